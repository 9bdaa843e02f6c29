"""Tables of indices. Callers may pass any integer dtype and any strides. Kernels read contiguous int32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .errors import type_error, value_error
from .tensors import check_not_meta

INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip


def index_table(op: str, name: str, x: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a table as kernels read it, a contiguous vector of ``dtype``. Copy it if it has another form.

    Raises:
        TypeError: the table does not contain integers.
        ValueError: the table is not a dense vector, or :func:`narrowed` rejects a value.
    """
    # Fast path: most plans get such a table.
    if (
        type(x) is torch.Tensor and x.dtype is dtype and x.dim() == 1 and x.layout is torch.strided
        and x.is_contiguous() and not x.is_meta
    ):  # fmt: skip
        return x
    if not isinstance(x, torch.Tensor):
        raise type_error(op, name, type(x).__name__, "Tensor")
    if x.layout != torch.strided:
        raise value_error(op, name, f"a tensor of {x.layout} and {x.dtype}", "a dense one")
    if x.dtype not in INTEGERS:
        raise type_error(op, name, x.dtype, f"{dtype} or other integers")
    if x.dim() != 1:
        raise value_error(op, name, f"shape {list(x.shape)}", "a vector")
    if x.is_meta:
        check_not_meta(op, name, x)
    return narrowed(op, name, x, dtype).contiguous()


def index_tables(op: str, **tables: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return :func:`index_table` of each table, by name."""
    return {name: index_table(op, name, table) for name, table in tables.items()}


def narrowed(op: str, name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return integers as ``dtype``.

    Raises:
        ValueError: a value on the CPU that does not fit into ``dtype``. The host does not read values of a
            GPU: they become the nearest value of ``dtype``, so invalid indices stay invalid.
    """
    if x.dtype == dtype:
        return x
    wide, limits = x.to(torch.int64), torch.iinfo(dtype)
    if x.is_cpu and not is_dynamo_compiling() and x.numel():
        for value in (int(one) for one in wide.aminmax()):
            if not limits.min <= value <= limits.max:
                raise value_error(op, name, value, f"{limits.min} to {limits.max}")
    return wide.clamp(limits.min, limits.max).to(dtype)


def check_each(
    op: str, name: str, x: torch.Tensor, least: int | torch.Tensor, most: int | torch.Tensor, why: str = ""
) -> None:
    """Check each number of a vector on the host. Limits are numbers, or vectors with a limit for each number.

    Raises:
        ValueError: a number below ``least`` or above ``most``.
    """
    wrong = (x < least) | (x > most)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        low, high = (int(one[at]) if isinstance(one, torch.Tensor) else one for one in (least, most))
        raise value_error(op, f"{name}[{at}]", int(x[at]), f"{low} to {high}{why}")


def check_offsets(op: str, name: str, offsets: torch.Tensor, count: int | None = None) -> tuple[int, int]:
    """Check that ``count + 1`` offsets on the host never decrease. Return the first and the last.

    A table may be a slice of a longer one, so the first offset need not be 0.

    Raises:
        ValueError: another number of offsets, one below 0, or one that decreases.
    """
    values = offsets.tolist()
    if count is not None and len(values) != count + 1:
        raise value_error(op, name, f"{len(values)} elements", f"{count + 1}, one more than requests")
    if not values or values[0] < 0:
        raise value_error(op, name, f"{values[0] if values else 'no element'} first", "0 or more")
    if values != sorted(values):
        at = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
        got = f"{values[at]} at {at} after {values[at - 1]}"
        raise value_error(op, name, got, "numbers that never decrease")
    return values[0], values[-1]


def with_indices(op: str, call: Callable[..., Any], positions: Mapping[int, str]) -> Callable[..., Any]:
    """Return ``call`` with support for any integers and strides at ``positions`` (position -> argument name).

    An eager call first passes the tables unchanged, so tables in the kernels' form cost nothing. If the operator
    rejects them, a second call passes copies. This is safe, because an operator checks all arguments before it writes.
    """

    def checked(*args: Any) -> Any:
        if not is_dynamo_compiling():
            try:
                return call(*args)
            except (TypeError, ValueError):
                if not any(_needs_copy(args[position]) for position in positions):
                    raise
        converted = list(args)
        for position, name in positions.items():
            if _needs_copy(args[position]):
                converted[position] = narrowed(op, name, args[position], torch.int32).contiguous()
        return call(*converted)

    return checked


def _needs_copy(x: object) -> bool:
    """Return whether a tensor contains integers, but kernels cannot read it without a copy."""
    if not isinstance(x, torch.Tensor) or x.dtype not in INTEGERS or x.layout != torch.strided:
        return False
    return x.dtype != torch.int32 or not x.is_contiguous()
