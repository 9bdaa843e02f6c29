"""Products of fp8 matrices whose blocks have scales: one function for all public ones, which differ in layouts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .._ops.dtypes import FP8
from .._ops.errors import called
from .._ops.tensors import check_tensor
from .arguments import BLOCK, blocks, check_dtype, check_same_depth, check_shape, matrices, rows
from .operators import SAME_NAMES, grouped_gemm

Granularity = tuple[int, int, int]
DEEPSEEK: Granularity = (1, BLOCK, BLOCK)


class Groups(NamedTuple):
    """Where the rows of each group are; without tensors they are equal parts."""

    m_indptr: torch.Tensor | None = None
    m_counts: torch.Tensor | None = None


def checked_granularity(function: str, granularity: Granularity | None) -> Granularity:
    try:
        m, n, k = DEEPSEEK if granularity is None else granularity
        if min(m, n, k) >= 1:
            return m, n, k
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{called(function)}: scale_granularity_mnk: got {granularity!r}, wanted three positive numbers")


def check_mode(function: str, scale_major_mode: str, mma_sm: int = 1) -> None:
    if scale_major_mode not in ("MN", "K"):
        raise ValueError(f"{called(function)}: scale_major_mode: got {scale_major_mode!r}, wanted 'MN' or 'K'")
    if mma_sm not in (1, 2):
        raise ValueError(f"{called(function)}: mma_sm: got {mma_sm}, wanted 1 or 2")


def groupwise(
    function: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    granularity: Granularity,
    groups: Groups = Groups(),  # noqa: B008
    mode: str = "K",
    names: Mapping[str, str] = SAME_NAMES,
) -> None:
    """Write ``out``: a ``[m, k]`` or ``[e, m, k]``, b ``[n, k]`` or ``[e, n, k]``.

    Args:
        mode: ``"K"``, scales with those of a row beside each other, or ``"MN"``, with those of a block of the depth.
        names: what the function calls arguments that it has by other names.
    """
    m, n, k = granularity
    check_dtype(function, "a", a.dtype, FP8)
    check_dtype(function, "b", b.dtype, FP8)
    check_same_depth(function, a, b, ("a", "b"))
    depths = blocks(a.shape[-1], k)
    for name, scale, x, each in (("a_scale", a_scale, a, m), ("b_scale", b_scale, b, n)):
        check_tensor(function, name, scale)
        check_dtype(function, name, scale.dtype, (torch.float32,))
        here = blocks(x.shape[-2], each)
        check_shape(function, name, scale, (*x.shape[:-2], *((here, depths) if mode == "K" else (depths, here))))
    if mode != "K":
        a_scale, b_scale = a_scale.transpose(-2, -1), b_scale.transpose(-2, -1)
    if b.dim() == 2:
        b, b_scale = b.unsqueeze(0), b_scale.unsqueeze(0)
    grouped_gemm(
        out, rows(a), matrices(b), a_scale, b_scale, groups.m_indptr, groups.m_counts, None, None, None, m, n, k,
        names=names,
    )  # fmt: skip
