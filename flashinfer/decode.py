"""Attention."""

from .jit.modules.decode import gen_single_decode_module

__all__ = ["gen_single_decode_module"]
