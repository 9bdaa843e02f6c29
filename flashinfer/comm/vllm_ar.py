"""vLLM's all-reduce over peers' memory: the names of FlashInfer 0.2.7."""

from __future__ import annotations

from .._compat.refused import declare

__all__ = declare(globals())
