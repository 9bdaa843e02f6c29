"""Kimi Delta Attention under FlashInfer's name. States ``[N, HV, V, K]`` change in place."""

from __future__ import annotations

from ._compat.kda import recurrent_kda

__all__ = ["recurrent_kda"]
