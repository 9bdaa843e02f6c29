"""Results multiplied by a scale and rounded to a dtype, as functions with scales write them."""

from __future__ import annotations

import torch

from .._ops.dtypes import FP8

_CLAMPED = (*FP8, torch.float16)


def check_scale(function: str, name: str, scale: torch.Tensor | None) -> None:
    """One number, or none."""
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"{function}: {name}: got {scale.numel()} elements, wanted 1")


def times(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``x * scale`` in float32."""
    return x.float() if scale is None else x.float() * scale.float().reshape(())


def rounded(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``x * scale`` as ``dtype``, at most its largest number where it has few bits."""
    scaled = times(x, scale)
    if scale is not None and dtype in _CLAMPED:
        most = torch.finfo(dtype).max
        scaled = scaled.clamp(-most, most)
    return scaled.to(dtype)
