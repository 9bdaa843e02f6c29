"""Multiplication of results by a scale, and rounding to a dtype."""

from __future__ import annotations

import torch

from .._ops.dtypes import FP8
from .._ops.tensors import check_count

_CLAMPED = (*FP8, torch.float16)


def check_scale(function: str, name: str, scale: torch.Tensor | None) -> None:
    """Check that a scale is ``None`` or has one element."""
    if scale is not None:
        check_count(function, name, scale, 1)


def times(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x * scale`` in float32."""
    return x.float() if scale is None else x.float() * scale.float().reshape(())


def rounded(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x * scale`` as ``dtype``. float16 and fp8 saturate."""
    scaled = times(x, scale)
    if scale is not None and dtype in _CLAMPED:
        most = torch.finfo(dtype).max
        scaled = scaled.clamp(-most, most)
    return scaled.to(dtype)
