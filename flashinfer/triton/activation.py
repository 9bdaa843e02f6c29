"""Activations with scales of eight-bit inputs and outputs.

Without scales they are :func:`flashinfer.silu_and_mul`.
"""

from __future__ import annotations

import torch

from .. import activation
from .._ops.errors import value_error
from ._scaled import check_scale, rounded, times

__all__ = ["silu_and_mul"]


def silu_and_mul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    o_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``silu(x[..., :d] * x_scale) * (x[..., d:] * x_scale) * o_scale`` in float32.

    Args:
        x: ``[..., 2 * d]``.
        x_scale, o_scale: one number each, on the device of ``x``; ``None`` is 1.
        dtype: dtype of the result, by default that of ``x``. With ``o_scale`` float16 and eight-bit results
            saturate.

    Returns:
        ``[..., d]``.

    Raises:
        ValueError: an odd last dimension, or scales of several numbers.

    Source: Shazeer: GLU Variants Improve Transformer, 2020.
    """
    check_scale("silu_and_mul", "x_scale", x_scale)
    check_scale("silu_and_mul", "o_scale", o_scale)
    if x.dim() < 1 or x.shape[-1] % 2:
        raise value_error("silu_and_mul", "x", f"shape {list(x.shape)}", "an even last dimension")
    if x_scale is None and o_scale is None and dtype in (None, x.dtype):
        return activation.silu_and_mul(x)
    gate, value = times(x, x_scale).chunk(2, -1)
    return rounded(torch.nn.functional.silu(gate) * value, o_scale, x.dtype if dtype is None else dtype)
