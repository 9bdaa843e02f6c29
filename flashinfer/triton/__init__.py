"""FlashInfer's address of functions that it has in Triton too: here they are this library's own kernels."""

from __future__ import annotations

from . import cascade as cascade

__all__ = ["cascade"]
