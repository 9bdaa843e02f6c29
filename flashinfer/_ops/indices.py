"""Tensors of indices. Callers pass any integers with any strides. Kernels read contiguous int32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .errors import type_error, value_error

INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip


def index_table(op: str, name: str, x: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a table as kernels read it: a contiguous vector of ``dtype``.

    Other integers and strides are copied.

    Raises:
        TypeError: no integers.
        ValueError: no dense vector, or a value that :func:`narrowed` rejects.
    """
    if not isinstance(x, torch.Tensor):
        raise type_error(op, name, type(x).__name__, "Tensor")
    if x.layout != torch.strided:
        raise value_error(op, name, f"a tensor of {x.layout} and {x.dtype}", "a dense one")
    if x.dtype not in INTEGERS:
        raise type_error(op, name, x.dtype, f"{dtype} or other integers")
    if x.dim() != 1:
        raise value_error(op, name, f"shape {list(x.shape)}", "a vector")
    if x.is_meta:
        raise value_error(op, name, "one on meta", "one with elements")
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


def with_indices(op: str, call: Callable[..., Any], positions: Mapping[int, str]) -> Callable[..., Any]:
    """Return ``call`` with any integers and strides at ``positions``, which maps to argument names.

    The operator checks everything before it writes. So tables that kernels can read cost nothing, and other
    tables are narrowed after the operator has rejected them.
    """

    def checked(*args: Any) -> Any:
        if not is_dynamo_compiling():
            try:
                return call(*args)
            except (TypeError, ValueError):
                if not any(_is_other(args[position]) for position in positions):
                    raise
        given = list(args)
        for position, name in positions.items():
            if _is_other(args[position]):
                given[position] = narrowed(op, name, args[position], torch.int32).contiguous()
        return call(*given)

    return checked


def _is_other(x: object) -> bool:
    """Return whether a tensor holds dense indices that kernels cannot read in place."""
    if not isinstance(x, torch.Tensor) or x.dtype not in INTEGERS or x.layout != torch.strided:
        return False
    return x.dtype != torch.int32 or not x.is_contiguous()
