"""TensorRT-LLM's exchange of tokens between experts' ranks: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from .. import _unsupported

__all__ = _unsupported.declare(
    globals(),
    _unsupported.SEVERAL_GPUS,
    functions=(
        "moe_comm",
        "moe_comm_prepare_indices",
        "moe_local_gather",
        "moe_prepare",
        "set_moe_max_usable_sm_count",
    ),
    classes=("MnnvlMoe", "MoEAlltoallInfo"),
)
