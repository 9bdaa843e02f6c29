"""Attention."""

from .jit.modules.prefill import gen_single_prefill_module

__all__ = ["gen_single_prefill_module"]
