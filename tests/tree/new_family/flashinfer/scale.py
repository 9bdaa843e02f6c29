"""Scaling."""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define, element_type
from .jit.modules.scale import POWERS, gen_scale_module

__all__ = ["gen_scale_module", "scaled"]


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _needs(spec: Any, input: torch.Tensor, factor: float, power: int) -> Any:
    return {**element_type(spec, input), "power": (str(power),)}


_scaled = define("scaled(Tensor input, float factor, int power) -> Tensor", gen_scale_module, _like_input, needs=_needs)


def scaled(input: torch.Tensor, factor: float, power: int = 1) -> torch.Tensor:
    """Return ``input * factor ** power``, multiplied in float32 and rounded once to ``input``'s dtype.

    Args:
        input: any shape, contiguous (float32, float16, bfloat16); on CUDA at a multiple of 16 bytes.
        factor: rounded to float32.
        power: 1 to 3.

    Raises:
        ValueError: ``input`` is not contiguous, or ``power`` is not supported.
        TypeError: the dtype is not supported.
    """
    if str(power) not in POWERS:
        raise ValueError(f"scaled: power: got {power}, wanted one of {', '.join(POWERS)}")
    return _scaled(input, factor, power)  # type: ignore[no-any-return]
