"""Mixtures of experts: what engines import of FlashInfer's module of this name."""

from __future__ import annotations

from enum import IntEnum

from .. import _unsupported


class ActivationType(IntEnum):
    """What stands between an expert's two products. Those with a linear half beside the gate have two rows for each."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3  # silu(gate) * linear
    Geglu = 4  # gelu(gate) * linear
    SwigluBias = 5
    Relu2 = 6  # relu(x) ** 2
    Situ = 7  # has no kernel
    GegluTanh = 8
    Identity = 9
    InvalidType = 10


__all__ = sorted([
    "ActivationType",
    *_unsupported.declare(
        globals(),
        _unsupported.TRTLLM_MOE,
        functions=(
            "convert_to_block_layout",
            "get_w2_permute_indices_with_cache",
            "trtllm_fp4_block_scale_moe",
            "trtllm_fp4_block_scale_routed_moe",
            "trtllm_mxint4_block_scale_moe",
        ),
    ),
])  # fmt: skip
_unsupported.declare(globals(), _unsupported.TRTLLM_MOE, functions=("_maybe_get_cached_w3_w1_permute_indices",))
