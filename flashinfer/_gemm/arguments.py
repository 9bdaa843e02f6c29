"""Arguments of the gemm family's functions: what is refused, and operands as the operator takes them."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops import tensors
from .._ops.dtypes import FLOATS
from .._ops.errors import called
from .._ops.tensors import check_tensor, is_readable

OUTPUTS = FLOATS
BLOCK = 128


def check_dims(function: str, rank: int, **given: torch.Tensor) -> None:
    for name, x in given.items():
        tensors.check_dims(function, name, x, rank)


def check_dtype(function: str, name: str, dtype: object, wanted: tuple[torch.dtype, ...]) -> None:
    if dtype not in wanted:
        raise TypeError(f"{called(function)}: {name}: got {dtype}, wanted {' or '.join(map(str, wanted))}")


def check_same_depth(function: str, a: torch.Tensor, b: torch.Tensor, names: tuple[str, str]) -> None:
    """Operands ``[..., k]``, as the operator takes them."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{called(function)}: {names[1]}: got a depth of {b.shape[-1]}, wanted {a.shape[-1]} as {names[0]} has"
        )


def check_shape(function: str, name: str, x: torch.Tensor, *wanted: tuple[int, ...]) -> None:
    """One of the shapes. Sizes of which a graph may know nothing yet are compared when it runs, by the operator."""
    if x.dim() != len(wanted[0]):
        raise ValueError(f"{called(function)}: {name}: got {x.dim()} dimensions, wanted {len(wanted[0])}")
    if not is_dynamo_compiling() and tuple(x.shape) not in wanted:
        shapes = " or ".join(str(list(shape)) for shape in wanted)
        raise ValueError(f"{called(function)}: {name}: got shape {list(x.shape)}, wanted {shapes}")


def output(
    function: str,
    out: torch.Tensor | None,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    name: str = "out",
    default: torch.dtype = torch.bfloat16,
    zeros: bool = False,
) -> torch.Tensor:
    """``out``, or a new tensor; a dtype that is given beside ``out`` is its."""
    if out is None:
        dtype = default if dtype is None else dtype
        check_dtype(function, "out_dtype", dtype, OUTPUTS)
        return like.new_zeros(shape, dtype=dtype) if zeros else like.new_empty(shape, dtype=dtype)
    check_tensor(function, name, out)
    check_shape(function, name, out, shape)
    check_dtype(function, name, out.dtype, OUTPUTS if dtype is None else (dtype,))
    return out


def rows(x: torch.Tensor) -> torch.Tensor:
    """Numbers of a row beside each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def matrices(b: torch.Tensor) -> torch.Tensor:
    """``[e, n, k]`` with numbers of the depth beside each other or, of 16 bits and more, those of a step of it."""
    if b.stride(-1) == 1 or (b.itemsize > 1 and b.stride(-2) == 1):
        return b
    return b.contiguous()


def blocks(size: int, each: int) -> int:
    return (size + each - 1) // each


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[m, k]`` in float8_e4m3fn with a scale for each 128 numbers of a row, ``[m, k / 128]``."""
    parts = x.float().unflatten(-1, (-1, BLOCK))
    most = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, most / torch.finfo(torch.float8_e4m3fn).max)
    return (parts / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def in_eight_bits(
    function: str, name: str, x: torch.Tensor, scale: torch.Tensor | None, *shapes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[m, k]`` in float8_e4m3fn with its scales, which have one of the shapes where they are given."""
    if x.dtype == torch.bfloat16:
        if scale is not None:
            raise ValueError(f"{called(function)}: {name}_scale: got one beside bfloat16, wanted None")
        return quantized(x)
    if x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{called(function)}: {name}: got {x.dtype}, wanted FP8 (float8_e4m3fn) or BF16")
    if scale is None:
        raise ValueError(f"{called(function)}: {name}_scale: got None, wanted scales of float8_e4m3fn")
    check_dims(function, 2, **{f"{name}_scale": scale})
    check_dtype(function, f"{name}_scale", scale.dtype, (torch.float32,))
    check_shape(function, f"{name}_scale", scale, *shapes)
    return x, scale


def one_number(function: str, name: str, scale: torch.Tensor) -> torch.Tensor:
    """The scale of all numbers, as the operator takes it."""
    check_tensor(function, name, scale)
    check_dtype(function, name, scale.dtype, (torch.float32,))
    if scale.numel() != 1:
        raise ValueError(f"{called(function)}: {name}: got {scale.numel()} elements, wanted 1")
    return scale.reshape(1, 1, 1)


def runs_of(function: str, m_indices: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows of each group begin, and how many there are; entries that name no group are of none.

    Raises:
        ValueError: indices on the CPU that name no group and are not negative, or of groups whose rows lie apart.
    """
    known = (m_indices >= 0) & (m_indices < num_groups)
    groups = torch.where(known, m_indices, num_groups).long()
    size, place = m_indices.shape[0], torch.arange(m_indices.shape[0], device=m_indices.device)
    begins = torch.full((num_groups + 1,), size, device=m_indices.device).scatter_reduce(0, groups, place, "amin")
    counts = torch.zeros_like(begins).scatter_add(0, groups, torch.ones_like(place))
    if is_readable(m_indices) and size:
        if int(m_indices.max()) >= num_groups:
            raise ValueError(
                f"{called(function)}: m_indices: got {int(m_indices.max())}, wanted less than {num_groups}"
            )
        apart = groups[known & (place >= (begins + counts)[groups])]
        if apart.numel():
            text = f"got rows of {int(apart[0])} that lie apart, wanted those of a group beside each other"
            raise ValueError(f"{called(function)}: m_indices: {text}")
    return begins, counts[:-1]
