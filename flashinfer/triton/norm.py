"""RMSNorm with scales of eight-bit inputs and outputs. Without scales it is :mod:`flashinfer.norm`."""

from __future__ import annotations

import torch

from .. import norm
from .._ops.shapes import check_tensors
from ._scaled import check_scale, rounded, times

__all__ = ["rms_norm", "rms_norm_add_residual"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    in_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """Write ``out = rmsnorm(x * in_scale, weight) * out_scale`` along the last dimension, in float32.

    Args:
        x: ``[..., hidden_size]``.
        weight: ``[hidden_size]``.
        out: of ``x``'s shape and any dtype, written. With ``out_scale`` float16 and eight-bit results
            saturate.
        eps: added to the mean of the squares.
        in_scale, out_scale: one number each, on the device of ``x``; ``None`` is 1.

    Raises:
        ValueError: invalid shapes, or scales of several numbers.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, 2019.
    """
    check_scale("rms_norm", "in_scale", in_scale)
    check_scale("rms_norm", "out_scale", out_scale)
    _check_shapes("rms_norm", x, weight, out=out)
    if in_scale is None and out_scale is None and x.dtype == weight.dtype == out.dtype:
        norm.rmsnorm(x, weight, eps, out)
    else:
        out.copy_(rounded(_normalized(times(x, in_scale), weight, eps), out_scale, out.dtype))


def rms_norm_add_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_out: torch.Tensor | None = None,
    x_in_scale: torch.Tensor | None = None,
    x_out_scale: torch.Tensor | None = None,
) -> None:
    """Compute ``residual += x * x_in_scale``, then ``x_out = rmsnorm(residual, weight) * x_out_scale``.

    Args:
        x: ``[..., hidden_size]``; overwritten without ``x_out``.
        residual: same shape, overwritten with the sum. The sum is normalised before it is rounded.
        weight, eps: as for :func:`rms_norm`.
        x_out: same shape and any dtype, written instead of ``x``.
        x_in_scale, x_out_scale: as ``in_scale`` and ``out_scale`` of :func:`rms_norm`.

    Raises:
        ValueError: as :func:`rms_norm`.
    """
    out = x if x_out is None else x_out
    check_scale("rms_norm_add_residual", "x_in_scale", x_in_scale)
    check_scale("rms_norm_add_residual", "x_out_scale", x_out_scale)
    _check_shapes("rms_norm_add_residual", x, weight, residual=residual, x_out=out)
    plain = x_in_scale is None and x_out_scale is None and x_out is None
    if plain and x.dtype == residual.dtype == weight.dtype:
        norm.fused_add_rmsnorm(x, residual, weight, eps)
    else:
        total = residual.float() + times(x, x_in_scale)
        residual.copy_(total)
        out.copy_(rounded(_normalized(total, weight, eps), x_out_scale, out.dtype))


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _check_shapes(function: str, x: torch.Tensor, weight: torch.Tensor, **same: torch.Tensor) -> None:
    shape = tuple(x.shape)
    check_tensors(
        function, **{"x": (x, None), "weight": (weight, shape[-1:]), **{k: (t, shape) for k, t in same.items()}}
    )
