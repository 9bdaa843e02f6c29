"""Normalisation along the last dimension."""

from __future__ import annotations

from typing import Any

import torch

from .jit.modules.norm import gen_norm_module
from .ops import define

__all__ = [
    "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "gen_norm_module",
    "layernorm",
    "rmsnorm",
]


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def _nothing(*_: Any) -> None:
    return None


_RMSNORM = "(Tensor input, Tensor weight, float eps, bool? enable_pdl) -> Tensor"
_RMSNORM_OUT = "(Tensor(a!) out, Tensor input, Tensor weight, float eps, bool? enable_pdl) -> ()"
_FUSED_ADD = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool? enable_pdl) -> ()"

_rmsnorm = define(f"rmsnorm{_RMSNORM}", gen_norm_module, _like_input)
_rmsnorm_out = define(f"rmsnorm_out{_RMSNORM_OUT}", gen_norm_module, _nothing)
_gemma_rmsnorm = define(f"gemma_rmsnorm{_RMSNORM}", gen_norm_module, _like_input)
_gemma_rmsnorm_out = define(f"gemma_rmsnorm_out{_RMSNORM_OUT}", gen_norm_module, _nothing)
_fused_add_rmsnorm = define(f"fused_add_rmsnorm{_FUSED_ADD}", gen_norm_module, _nothing)
_gemma_fused_add_rmsnorm = define(f"gemma_fused_add_rmsnorm{_FUSED_ADD}", gen_norm_module, _nothing)
_layernorm = define(
    "layernorm(Tensor input, Tensor gemma, Tensor beta, float eps) -> Tensor", gen_norm_module, _like_input
)
_layernorm_out = define(
    "layernorm_out(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, float eps) -> ()", gen_norm_module, _nothing
)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Root mean square normalisation: ``out = input / sqrt(mean(input ** 2) + eps) * weight`` along the last dimension.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); leading dimensions of any strides that two
            dimensions can express.
        weight: ``[hidden_size]``, same dtype.
        eps: added to the mean of the squares.
        out: same shape and dtype as ``input``; may be ``input`` itself. Made where not given.
        enable_pdl: programmatic dependent launch (compute capability 9.0 and newer); by default where the GPU has it.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes, strides or devices that do not fit, or ``out`` overlapping an input partly.
        TypeError: dtypes that do not fit.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, 2019. Sums are in float32.
    """
    if out is None:
        return _rmsnorm(input, weight, eps, enable_pdl)  # type: ignore[no-any-return]
    _rmsnorm_out(out, input, weight, eps, enable_pdl)
    return out


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Gemma's RMSNorm: :func:`rmsnorm` with ``weight + 1`` in the place of ``weight``, added in float32.

    Arguments, result and errors are those of :func:`rmsnorm`.
    """
    if out is None:
        return _gemma_rmsnorm(input, weight, eps, enable_pdl)  # type: ignore[no-any-return]
    _gemma_rmsnorm_out(out, input, weight, eps, enable_pdl)
    return out


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add and normalise in place: ``residual += input``, then ``input = rmsnorm(residual, weight)``.

    The sum is normalised as computed, in float32; ``residual`` gets it rounded to its dtype.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16), overwritten with the normalised sum.
        residual: same shape and dtype, overwritten with the sum.
        weight: ``[hidden_size]``, same dtype.
        eps, enable_pdl: as for :func:`rmsnorm`.

    Raises:
        ValueError: shapes, strides or devices that do not fit, or arguments that overlap.
        TypeError: dtypes that do not fit.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """:func:`fused_add_rmsnorm` with ``weight + 1`` in the place of ``weight``, as in :func:`gemma_rmsnorm`."""
    _gemma_fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


def layernorm(
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layer normalisation: ``out = (input - mean) / sqrt(var + eps) * gemma + beta`` along the last dimension.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); leading dimensions of any strides that two
            dimensions can express.
        gemma, beta: ``[hidden_size]``, both float32 or both of ``input``'s dtype.
        eps: added to the (biased) variance.
        out: same shape and dtype as ``input``; may be ``input`` itself. Made where not given.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError: as :func:`rmsnorm`.

    Source: Ba, Kiros, Hinton: Layer Normalization, 2016. Mean and variance are in float32, the variance from deviations.
    """
    if out is None:
        return _layernorm(input, gemma, beta, eps)  # type: ignore[no-any-return]
    _layernorm_out(out, input, gemma, beta, eps)
    return out
