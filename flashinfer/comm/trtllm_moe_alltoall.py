"""TensorRT-LLM's one-sided exchange between experts' ranks: vLLM's manager of communicators imports these names."""

from __future__ import annotations

from .. import _unsupported

__all__ = _unsupported.declare(
    globals(),
    _unsupported.SEVERAL_GPUS,
    functions=("moe_a2a_get_workspace_size_per_rank",),
    classes=("MoeAlltoAll",),
)
