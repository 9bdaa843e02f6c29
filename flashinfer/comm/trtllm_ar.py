"""TensorRT-LLM's all-reduce, plain and fused with the next layer: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from .._compat.refused import declare
from . import _codes
from ._codes import *  # noqa: F403

__all__ = sorted([*_codes.__all__, *declare(globals())])
