"""Multi-head latent attention: the names that engines import without a guard."""

from __future__ import annotations

from . import _unsupported

__all__ = _unsupported.declare(
    globals(),
    _unsupported.MLA,
    functions=("trtllm_batch_decode_with_kv_cache_mla",),
    classes=("BatchDecodeMlaWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"),
)
