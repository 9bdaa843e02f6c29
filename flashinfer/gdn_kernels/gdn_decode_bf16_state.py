"""Verification of draft tokens on a pool of states, with the arguments of FlashInfer's bfloat16 kernel."""

from __future__ import annotations

from .._compat.gdn_decode_bf16_state import gated_delta_rule_mtp

__all__ = ["gated_delta_rule_mtp"]
