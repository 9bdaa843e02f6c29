"""Module of the gradients of attention. Training loads it, inference never does.

:func:`flashinfer.single_prefill_with_kv_cache` and :class:`flashinfer.BatchPrefillWithRaggedKVCacheWrapper`
are differentiable. The generator of the module is the only public name of this family.

Source: Dao: FlashAttention-2, 2023.
"""

from .jit.modules.prefill_backward import gen_prefill_backward_module

__all__ = ["gen_prefill_backward_module"]
