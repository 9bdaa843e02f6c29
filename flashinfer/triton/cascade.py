"""Merging of attention states at FlashInfer's second address.

The functions are those of :mod:`flashinfer.cascade`.
"""

from __future__ import annotations

from ..cascade import merge_state, merge_state_in_place, merge_states, variable_length_merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]
