"""Gradients of attention: what training needs and inference never loads.

:func:`flashinfer.single_prefill_with_kv_cache` and :class:`flashinfer.BatchPrefillWithRaggedKVCacheWrapper` are
differentiable as they are: nothing of this family is called by name but the generator of its module.

Source: Dao: FlashAttention-2, 2023.
"""

from .jit.modules.prefill_backward import gen_prefill_backward_module

__all__ = ["gen_prefill_backward_module"]
