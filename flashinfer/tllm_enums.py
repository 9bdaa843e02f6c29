"""Enumerations that engines import from FlashInfer's module of this name. The numbers are FlashInfer's."""

from __future__ import annotations

from ._compat.tllm_enums import (
    DEFAULT_SITU_BETA,
    DEFAULT_SITU_LINEAR_BETA,
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
    RoutingMethodType,
    is_gated_activation,
)

__all__ = [
    "DEFAULT_SITU_BETA",
    "DEFAULT_SITU_LINEAR_BETA",
    "DEFAULT_SWIGLU_ALPHA",
    "DEFAULT_SWIGLU_BETA",
    "DEFAULT_SWIGLU_LIMIT",
    "ActivationType",
    "RoutingMethodType",
    "is_gated_activation",
]
