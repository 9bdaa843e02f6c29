"""Quantisation to 4-bit types with block scales: names that engines import.

Only SM100 and newer support them.
"""

from __future__ import annotations

from enum import IntEnum

from . import _unsupported


class SfLayout(IntEnum):
    """Layout of the scales of a block-scaled tensor."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


__all__ = sorted([
    "SfLayout",
    *_unsupported.declare(
        globals(),
        _unsupported.FP4,
        functions=(
            "block_scale_interleave",
            "fp4_quantize",
            "fp4_swizzle_blockscale",
            "mm_mxfp8",
            "mxfp8_quantize",
            "nvfp4_block_scale_interleave",
            "nvfp4_quantize",
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
            "scaled_fp4_grouped_quantize",
            "shuffle_matrix_a",
            "shuffle_matrix_sf_a",
            "silu_and_mul_scaled_nvfp4_experts_quantize",
        ),
    ),
])  # fmt: skip
