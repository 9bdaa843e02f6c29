"""Products of groups of rows in 16 bits, under the name of newer callers."""

from __future__ import annotations

from ._compat.grouped_mm import grouped_mm_bf16

__all__ = ["grouped_mm_bf16"]
