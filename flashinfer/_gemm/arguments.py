"""Checks of the gemm family's arguments, and operands as the operator takes them."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.arguments import check_none, check_present
from .._ops.dtypes import FLOATS
from .._ops.errors import value_error
from .._ops.numbers import check_range
from .._ops.shapes import check_tensors
from .._ops.tensors import check_count, check_dtype, is_readable

OUTPUTS = FLOATS
BLOCK = 128
F32 = (torch.float32,)


def output(
    function: str,
    out: torch.Tensor | None,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    default: torch.dtype = torch.bfloat16,
    zeros: bool = False,
) -> torch.Tensor:
    """Return ``out``, whose shape is already checked, or a new tensor.

    A ``dtype`` must be that of ``out``.
    """
    if out is None:
        dtype = default if dtype is None else dtype
        check_dtype(function, "out_dtype", dtype, OUTPUTS)
        return like.new_zeros(shape, dtype=dtype) if zeros else like.new_empty(shape, dtype=dtype)
    check_dtype(function, "out", out.dtype, OUTPUTS if dtype is None else (dtype,))
    return out


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def matrices(b: torch.Tensor) -> torch.Tensor:
    """Return ``[e, n, k]`` with contiguous rows. Matrices of 16 bits and more may have contiguous columns."""
    if b.stride(-1) == 1 or (b.itemsize > 1 and b.stride(-2) == 1):
        return b
    return b.contiguous()


def blocks(size: int, each: int) -> int:
    """Return the number of blocks that cover ``size``."""
    return (size + each - 1) // each


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[m, k]`` in float8_e4m3fn with a scale for each 128 numbers of a row, ``[m, k / 128]``."""
    parts = x.float().unflatten(-1, (-1, BLOCK))
    most = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, most / torch.finfo(torch.float8_e4m3fn).max)
    return (parts / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def in_eight_bits(
    function: str, name: str, x: torch.Tensor, scale: torch.Tensor | None, *shapes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[m, k]`` in float8_e4m3fn with its scales.

    Scales of the caller must have one of the shapes.

    Raises:
        ValueError: an invalid dtype of ``x`` also, because engines catch this type.
    """
    if x.dtype == torch.bfloat16:
        check_none(function, f"{name}_scale", scale, f"{name}_scale should not be provided for BF16")
        return quantized(x)
    if x.dtype != torch.float8_e4m3fn:
        raise value_error(function, name, x.dtype, "FP8 (float8_e4m3fn) or BF16")
    scale = check_present(function, f"{name}_scale", scale, f"a tensor: {name}_scale is required when {name} is FP8")
    check_tensors(function, **{f"{name}_scale": (scale, "_ _", F32)})
    if not is_dynamo_compiling() and tuple(scale.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise value_error(function, f"{name}_scale", f"shape {list(scale.shape)}", wanted)
    return x, scale


def one_number(function: str, name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return the scale of all numbers as the operator takes it."""
    check_count(function, name, scale, 1)
    return scale.reshape(1, 1, 1)


def group_ranges(function: str, m_indices: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row and the number of rows of each group. Invalid entries belong to no group.

    Raises:
        ValueError: on the CPU an index of ``num_groups`` or more, or a group whose rows are not neighbours.
    """
    known = (m_indices >= 0) & (m_indices < num_groups)
    groups = torch.where(known, m_indices, num_groups).long()
    size = m_indices.shape[0]
    row = torch.arange(size, device=m_indices.device)
    begins = torch.full((num_groups + 1,), size, device=m_indices.device).scatter_reduce(0, groups, row, "amin")
    counts = torch.zeros_like(begins).scatter_add(0, groups, torch.ones_like(row))
    if is_readable(m_indices) and size:
        check_range(function, "m_indices", int(m_indices.max()), most=num_groups - 1)
        apart = groups[known & (row >= (begins + counts)[groups])]
        if apart.numel():
            raise value_error(function, "m_indices", f"rows of {int(apart[0])} that lie apart", "neighbours in a group")
    return begins, counts[:-1]
