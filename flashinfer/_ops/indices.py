"""Tensors of indices: callers have them of any integer dtype and with any strides, kernels as contiguous int32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip


def index_table(op: str, name: str, x: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A table as kernels read it: a contiguous vector of ``dtype``. Other integers and strides are copied.

    Raises:
        TypeError: no integers.
        ValueError: no dense vector, or a value that :func:`narrowed` refuses.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{op}: {name}: got a tensor of {x.layout} and {x.dtype}, wanted a dense one")
    if x.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name}: got {x.dtype}, wanted {dtype} or other integers")
    if x.dim() != 1:
        raise ValueError(f"{op}: {name}: got shape {list(x.shape)}, wanted a vector")
    if x.is_meta:
        raise ValueError(f"{op}: {name}: got one on meta, wanted one with elements")
    return narrowed(op, name, x, dtype).contiguous()


def index_tables(op: str, **tables: torch.Tensor) -> dict[str, torch.Tensor]:
    """:func:`index_table` of each, by its name."""
    return {name: index_table(op, name, table) for name, table in tables.items()}


def narrowed(op: str, name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers as ``dtype``.

    Raises:
        ValueError: a value on the CPU that ``dtype`` does not have. One of a device, which is not read on the host,
            becomes the nearest that it has: what led nowhere leads nowhere still.
    """
    if x.dtype == dtype:
        return x
    wide, limits = x.to(torch.int64), torch.iinfo(dtype)
    if x.is_cpu and not is_dynamo_compiling() and x.numel():
        for value in (int(one) for one in wide.aminmax()):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{op}: {name}: got {value}, wanted {limits.min} to {limits.max}")
    return wide.clamp(limits.min, limits.max).to(dtype)


def with_indices(op: str, call: Callable[..., Any], positions: Mapping[int, str]) -> Callable[..., Any]:
    """``call``, an operator's, whose arguments at ``positions``, by their names, may be any integers with any strides.

    Those that kernels can read cost nothing: others are narrowed once the operator, which writes nothing before all is
    checked, has refused them.
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
    """Return whether these are dense indices that kernels cannot read in place."""
    if not isinstance(x, torch.Tensor) or x.dtype not in INTEGERS or x.layout != torch.strided:
        return False
    return x.dtype != torch.int32 or not x.is_contiguous()
