"""Operators of DeepSeek-V3 under FlashInfer's name of this module."""

from __future__ import annotations

from .fused_moe import fused_topk_deepseek

__all__ = ["fused_topk_deepseek"]
