"""Matrix products: the names that engines import without a guard."""

from __future__ import annotations

from . import _unsupported

__all__ = _unsupported.declare(
    globals(),
    _unsupported.GEMM,
    functions=("bmm_fp8", "fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise"),
    classes=("SegmentGEMMWrapper",),
)
