"""TensorRT-LLM's all-reduce, plain and fused with the next layer: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from . import _codes, _trtllm
from ._codes import *  # noqa: F403
from ._trtllm import *  # noqa: F403
from ._trtllm import LamportTokenNumThreshold as LamportTokenNumThreshold

__all__ = sorted([*_codes.__all__, *_trtllm.__all__])
