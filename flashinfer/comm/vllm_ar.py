"""vLLM's all-reduce over peers' memory: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from . import _vllm
from ._vllm import *  # noqa: F403

__all__ = _vllm.__all__
