"""Mixtures of experts: routing, and each expert's products of its tokens.

A token is routed to ``top_k`` experts. A slot is a pair of a token and one of its experts. Slots are sorted
by expert. Numbers of rows stay on the device, so nothing waits for it and a CUDA graph serves any routing.
"""

from __future__ import annotations

from ..jit.modules.fused_moe import (
    gen_cutlass_fused_moe_sm90_module,
    gen_fused_moe_module,
    gen_fused_moe_sm100_module,
)
from ..mxfp4_gemm import dequantize_mxfp4 as dequantize_mxfp4
from ..mxfp4_gemm import interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm
from ..mxfp4_gemm import interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm
from ..mxfp4_gemm import quantize_mxfp4 as quantize_mxfp4
from . import core
from .core import *  # noqa: F403 - every name of it is found here too, as in FlashInfer
from .routing import fused_topk_deepseek, route

__all__ = [
    *core.__all__,
    "fused_topk_deepseek",
    "gen_cutlass_fused_moe_sm90_module",
    "gen_fused_moe_module",
    "gen_fused_moe_sm100_module",
    "route",
]
__all__.sort()
