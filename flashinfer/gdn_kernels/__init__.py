"""Gated DeltaNet's functions under module names that engines import.

The kernels are those of the delta rule.
"""

from __future__ import annotations

from . import gdn_decode_bf16_state

__all__ = ["gdn_decode_bf16_state"]
