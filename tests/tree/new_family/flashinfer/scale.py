"""Scaling."""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from .jit.modules.scale import gen_scale_module

__all__ = ["gen_scale_module", "scaled"]


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(input)


_scaled = define("scaled(Tensor input, float factor) -> Tensor", gen_scale_module, _like_input)


def scaled(input: torch.Tensor, factor: float) -> torch.Tensor:
    """``input * factor``, rounded once.

    Args:
        input: any shape, contiguous (float32, float16, bfloat16).
        factor: rounded to float32.

    Raises:
        ValueError: not contiguous.
        TypeError: another dtype.
    """
    return _scaled(input, factor)  # type: ignore[no-any-return]
