"""Gated DeltaNet's prefill under FlashInfer's name and in its conventions.

The kernels are those of :mod:`flashinfer.delta_rule`, but the conventions differ: tensors are packed, **g is
the decay itself**, in (0, 1], and **states are** ``[N, H, V, K]``. If K = V, nothing can tell such states
from ``[N, H, K, V]``.
"""

from __future__ import annotations

from ._compat.gdn_prefill import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
