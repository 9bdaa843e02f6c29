"""Products of fp8 matrices with block scales, under DeepGEMM's names. Operands are ``(matrix, scales)``."""

from __future__ import annotations

from ._compat.deep_gemm import (
    fp8_gemm_nt,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)

__all__ = [
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]
