"""vLLM's all-reduce over peers' memory: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from .. import _unsupported

__all__ = _unsupported.declare(
    globals(),
    _unsupported.SEVERAL_GPUS,
    functions=(
        "vllm_all_reduce",
        "vllm_dispose",
        "vllm_get_graph_buffer_ipc_meta",
        "vllm_init_custom_ar",
        "vllm_meta_size",
        "vllm_register_buffer",
        "vllm_register_graph_buffers",
    ),
)
