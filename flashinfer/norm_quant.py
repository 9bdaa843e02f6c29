"""Norms with a quantised result: numbers of eight bits and one scale for the next layer.

Source of the formats: Micikevicius et al.: FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.route import without_gradient
from ._ops.scalars import scale_or_tensor
from .jit.modules.norm_quant import gen_norm_quant_module

__all__ = [
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "gen_norm_quant_module",
    "layernorm_quant",
    "rmsnorm_quant",
]

Number = float | torch.Tensor


_rmsnorm_quant = define(
    "rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor weight, float scale, Tensor? scale_tensor, float eps,"
    " Tensor? eps_tensor, bool? enable_pdl) -> ()",
    gen_norm_quant_module,
    fallback=without_gradient("rmsnorm_quant", "input", "weight"),
)
_fused_add_rmsnorm_quant = define(
    "fused_add_rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, float scale,"
    " Tensor? scale_tensor, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
    gen_norm_quant_module,
    fallback=without_gradient("fused_add_rmsnorm_quant", "input", "residual", "weight"),
)
_layernorm_quant = define(
    "layernorm_quant(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, float scale, Tensor? scale_tensor,"
    " float eps, Tensor? eps_tensor) -> ()",
    gen_norm_quant_module,
    fallback=without_gradient("layernorm_quant", "input", "gemma", "beta"),
)
_block_quant = define(
    "fused_add_rmsnorm_fp8_block_quant(Tensor(a!) out, Tensor(b!) block_scale, Tensor(c!) normed_out, Tensor input,"
    " Tensor(d!) residual, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
    gen_norm_quant_module,
    fallback=without_gradient("fused_add_rmsnorm_fp8_block_quant", "input", "residual", "weight"),
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
    _rmsnorm_quant(out, input, weight, *scale_or_tensor(scale, input), *scale_or_tensor(eps, input), enable_pdl)
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
    _fused_add_rmsnorm_quant(
        out, input, residual, weight, *scale_or_tensor(scale, input), *scale_or_tensor(eps, input), enable_pdl
    )


def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: Number,
    eps: float = 1e-6,
) -> None:
    """Normalise, then quantise: ``out = layernorm(input, gemma, beta, eps) / scale``.

    The normalised values are rounded to the dtype of ``input`` before the division.

    Args:
        out: float8_e4m3fn, float8_e5m2 or int8 of ``input``'s shape, written, rounded as in
            :func:`rmsnorm_quant`.
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); any strides of leading dimensions that
            three dimensions can express.
        gemma, beta: ``[hidden_size]``, factor and term, float32 or the dtype of ``input``.
        scale, eps: as for :func:`rmsnorm_quant`.

    Raises:
        ValueError, TypeError, GradientError: as :func:`rmsnorm_quant`.
    """
    _layernorm_quant(out, input, gemma, beta, *scale_or_tensor(scale, input), *scale_or_tensor(eps, input))


def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise, and quantise blocks of 128 columns: ``out = normed_out / block_scale``.

    ``residual += input``, ``normed_out = rmsnorm(residual, weight, eps)``. The sum is normalised in float32.
    A block's scale is its largest magnitude in ``normed_out``, as rounded and at least 1e-10, divided by 448.

    Args:
        out: ``[T, hidden_size]`` float8_e4m3fn, written.
        block_scale: ``[hidden_size / 128, N]`` float32 with N >= T, usually T rounded up to a multiple of 4.
            Element ``[b, t]`` becomes the scale of block b of row t. Columns from T on are not written.
        normed_out: ``[T, hidden_size]``, dtype of ``input``, written; it may be ``input``.
        input, residual: ``[T, hidden_size]`` (float32, float16, bfloat16), of one dtype; any stride of rows.
            ``hidden_size`` is a multiple of 128. ``residual`` is overwritten with the sum.
        weight: ``[hidden_size]``, same dtype.
        eps: added to the mean of the squares.
        enable_pdl: as for :func:`rmsnorm_quant`.

    Raises:
        ValueError: invalid shapes, strides or devices, or arguments that overlap.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    _block_quant(out, block_scale, normed_out, input, residual, weight, *scale_or_tensor(eps, input), enable_pdl)
