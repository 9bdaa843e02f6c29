"""RMSNorm with a quantised result: numbers of eight bits and one scale for the next layer.

Source of the formats: Micikevicius et al.: FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import without_gradient
from ._ops.scalars import scalar
from .jit.modules.norm_quant import gen_norm_quant_module

__all__ = ["fused_add_rmsnorm_quant", "gen_norm_quant_module", "rmsnorm_quant"]

Number = float | torch.Tensor


def _nothing(*_: Any) -> None:
    return None


_rmsnorm_quant = define(
    "rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor weight, float scale, Tensor? scale_tensor, float eps,"
    " Tensor? eps_tensor, bool? enable_pdl) -> ()",
    gen_norm_quant_module,
    _nothing,
    general=without_gradient("rmsnorm_quant", "input", "weight"),
)
_fused_add_rmsnorm_quant = define(
    "fused_add_rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, float scale,"
    " Tensor? scale_tensor, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
    gen_norm_quant_module,
    _nothing,
    general=without_gradient("fused_add_rmsnorm_quant", "input", "residual", "weight"),
)


def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: Number,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise, then quantise: ``out = input / sqrt(mean(input ** 2) + eps) * weight / scale``.

    Args:
        out: float8_e4m3fn, float8_e5m2 or int8 of ``input``'s shape, written. Numbers are rounded to nearest,
            ties to even, and clamped to the finite numbers of its dtype. NaN stays NaN, and is 0 in int8.
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); any strides of leading dimensions that
            three dimensions can express.
        weight: ``[hidden_size]``, same dtype.
        scale: factor that turns ``out`` into the normalised values: a positive number, or a tensor of one
            element (float32, float64) on the device of ``input``. The host never reads the tensor.
        eps: added to the mean of the squares.
        enable_pdl: programmatic dependent launch (compute capability 9.0 and newer); by default if the GPU
            has it.

    Returns:
        ``out``.

    Raises:
        ValueError: invalid shapes, strides, devices or scale, or arguments that overlap.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    _rmsnorm_quant(out, input, weight, *_number(scale, input), *_number(eps, input), enable_pdl)
    return out


def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: Number,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise and quantise: ``residual += input``, ``out = rmsnorm_quant(residual, weight, scale)``.

    The sum is normalised in float32; ``residual`` receives it rounded to its dtype.

    Args:
        out: ``[..., hidden_size]`` of eight bits, written.
        input, residual: ``[..., hidden_size]``, of one dtype. ``residual`` is overwritten with the sum,
            ``input`` is not written.
        weight: ``[hidden_size]``, same dtype.
        scale, eps, enable_pdl: as for :func:`rmsnorm_quant`.

    Raises:
        ValueError, TypeError, GradientError: as :func:`rmsnorm_quant`.
    """
    _fused_add_rmsnorm_quant(out, input, residual, weight, *_number(scale, input), *_number(eps, input), enable_pdl)


def _number(number: Number, input: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """Return the operator's two arguments. The operator rejects other types."""
    if isinstance(number, torch.Tensor):
        return 1.0, number
    return scalar(number, input.device) if isinstance(input, torch.Tensor) else (1.0, None)
