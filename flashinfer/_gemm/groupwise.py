"""Products of fp8 matrices with block scales. Public functions differ only in layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .._ops.errors import value_error
from .._ops.numbers import check_option
from .._ops.shapes import check_tensors
from .arguments import BLOCK, F32, blocks, matrices, rows
from .operators import SAME_NAMES, grouped_gemm

Granularity = tuple[int, int, int]
DEEPSEEK: Granularity = (1, BLOCK, BLOCK)


class Groups(NamedTuple):
    """Rows of each group. Without tensors the groups are equal parts of the rows."""

    m_indptr: torch.Tensor | None = None
    m_counts: torch.Tensor | None = None


def checked_granularity(function: str, granularity: Granularity | None) -> Granularity:
    """Return three positive numbers, DeepSeek's by default."""
    try:
        m, n, k = DEEPSEEK if granularity is None else granularity
        if min(m, n, k) >= 1:
            return m, n, k
    except (TypeError, ValueError):
        pass
    raise value_error(function, "scale_granularity_mnk", repr(granularity), "three positive numbers")


def check_mode(function: str, scale_major_mode: str, mma_sm: int = 1) -> None:
    """Check the two options that FlashInfer's callers pass."""
    check_option(function, "scale_major_mode", scale_major_mode, ("MN", "K"))
    check_option(function, "mma_sm", mma_sm, (1, 2))


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
    """Write ``out``: a ``[m, k]`` or ``[e, m, k]``, b ``[n, k]`` or ``[e, n, k]``, both already checked.

    Args:
        mode: ``"K"`` for scales that are contiguous along the depth, or ``"MN"`` for scales contiguous along
            the rows.
        names: an argument of the operator -> its name in the public function.
    """
    m, n, k = granularity
    depths = blocks(a.shape[-1], k)

    def shape(x: torch.Tensor, each: int) -> tuple[int, ...]:
        here = blocks(x.shape[-2], each)
        return (*x.shape[:-2], *((here, depths) if mode == "K" else (depths, here)))

    check_tensors(
        function,
        **{
            names.get("a_scale", "a_scale"): (a_scale, shape(a, m), F32),
            names.get("b_scale", "b_scale"): (b_scale, shape(b, n), F32),
        },
    )
    if mode != "K":
        a_scale, b_scale = a_scale.transpose(-2, -1), b_scale.transpose(-2, -1)
    if b.dim() == 2:
        b, b_scale = b.unsqueeze(0), b_scale.unsqueeze(0)
    grouped_gemm(
        out, rows(a), matrices(b), a_scale, b_scale, groups.m_indptr, groups.m_counts, None, None, None, m, n, k,
        names=names,
    )  # fmt: skip
