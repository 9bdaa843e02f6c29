"""Products of fp8 matrices: the functions of :mod:`flashinfer.deep_gemm`."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.arguments import check_none
from ..gemm import batch_deepgemm_fp8_nt_groupwise, gemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise

__all__ = ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"]

Scaled = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Scaled, b: Scaled, d: torch.Tensor, c: None = None, **_: Any) -> None:
    """Write ``d = (a * scales) @ (b * scales).T``.

    ``a`` is ``[m, k]`` with scales ``[m, k / 128]``, ``b`` is ``[n, k]`` with scales ``[n / 128, k / 128]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`flashinfer.gemm.gemm_fp8_nt_groupwise`; a ``c`` that
            is not ``None``.
    """
    check_none("fp8_gemm_nt", "c", c, "nothing is added")
    gemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], "K", out=d)


def m_grouped_fp8_gemm_nt_contiguous(a: Scaled, b: Scaled, d: torch.Tensor, m_indices: torch.Tensor, **_: Any) -> None:
    """Call :func:`fp8_gemm_nt` for each row with matrix ``m_indices[i]`` of b; -1 skips a row."""
    group_deepgemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], m_indices, out=d)


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled, b: Scaled, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int, **_: Any
) -> None:
    """Call :func:`fp8_gemm_nt` for the first ``masked_m[i]`` rows of each matrix of a ``[e, m, k]``."""
    batch_deepgemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], masked_m, expected_m, out=d)
