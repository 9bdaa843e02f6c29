"""Products of fp8 matrices with block scales under DeepGEMM's names: operands are ``(matrix, scales)``, ``d`` is written."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import batch_deepgemm_fp8_nt_groupwise, gemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise

__all__ = ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"]

Scaled = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Scaled, b: Scaled, d: torch.Tensor, c: None = None, **_: Any) -> None:
    """``d = (a * scales) @ (b * scales).T``: a ``[m, k]`` with ``[m, k / 128]``, b ``[n, k]`` with ``[n / 128, k / 128]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`flashinfer.gemm.gemm_fp8_nt_groupwise`; ``c`` that is given.
    """
    if c is not None:
        raise ValueError("fp8_gemm_nt: c: got a tensor, wanted None: nothing is added")
    gemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], "K", out=d)


def m_grouped_fp8_gemm_nt_contiguous(a: Scaled, b: Scaled, d: torch.Tensor, m_indices: torch.Tensor, **_: Any) -> None:
    """:func:`fp8_gemm_nt` of each row with matrix ``m_indices[i]`` of b ``[e, n, k]``; rows with -1 stay as they are."""
    group_deepgemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], m_indices, out=d)


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled, b: Scaled, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int, **_: Any
) -> None:
    """:func:`fp8_gemm_nt` of the first ``masked_m[i]`` rows of each matrix of a ``[e, m, k]``; other rows stay."""
    batch_deepgemm_fp8_nt_groupwise(a[0], b[0], a[1], b[1], masked_m, expected_m, out=d)
