"""Products of fp8 matrices whose blocks have scales: one function for all public ones, which differ in layouts alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops.tensors import check_tensor
from .arguments import BLOCK, FP8, blocks, check_dtype, check_same_depth, check_shape, matrices, rows
from .operators import grouped_gemm

Granularity = tuple[int, int, int]
DEEPSEEK: Granularity = (1, BLOCK, BLOCK)


class Groups(NamedTuple):
    """Where the rows of each group are; without tensors they are equal parts."""

    m_indptr: torch.Tensor | None = None
    m_counts: torch.Tensor | None = None


def checked_granularity(function: str, granularity: Granularity | None) -> Granularity:
    m, n, k = DEEPSEEK if granularity is None else granularity
    if min(m, n, k) < 1:
        raise ValueError(f"{function}: scale_granularity_mnk: got {(m, n, k)}, wanted three positive numbers")
    return m, n, k


def check_mode(function: str, scale_major_mode: str, mma_sm: int = 1) -> None:
    if scale_major_mode not in ("MN", "K"):
        raise ValueError(f"{function}: scale_major_mode: got {scale_major_mode!r}, wanted 'MN' or 'K'")
    if mma_sm not in (1, 2):
        raise ValueError(f"{function}: mma_sm: got {mma_sm}, wanted 1 or 2")


def by_rows(function: str, name: str, scale: torch.Tensor, scale_major_mode: str) -> torch.Tensor:
    """Scales with those of a row beside each other, whatever their memory's order."""
    check_tensor(function, name, scale)
    if scale.dim() < 2:
        raise ValueError(f"{function}: {name}: got {scale.dim()} dimensions, wanted 2 or more")
    return scale if scale_major_mode == "K" else scale.transpose(-2, -1)


def groupwise(
    function: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    granularity: Granularity,
    groups: Groups = Groups(),  # noqa: B008
) -> None:
    """Write ``out``: a ``[m, k]`` or ``[e, m, k]``, b ``[e, n, k]``; scales with those of a row beside each other."""
    m, n, k = granularity
    check_dtype(function, "a", a.dtype, FP8)
    check_dtype(function, "b", b.dtype, FP8)
    check_same_depth(function, a, b, ("a", "b"))
    depths = blocks(a.shape[-1], k)
    for name, scale, wanted in (
        ("a_scale", a_scale, (*a.shape[:-2], blocks(a.shape[-2], m), depths)),
        ("b_scale", b_scale, (b.shape[0], blocks(b.shape[1], n), depths)),
    ):
        check_tensor(function, name, scale)
        check_dtype(function, name, scale.dtype, (torch.float32,))
        check_shape(function, name, scale, wanted)
    grouped_gemm(
        out, rows(a), matrices(b), a_scale, b_scale, groups.m_indptr, groups.m_counts, None, None, None, m, n, k
    )
