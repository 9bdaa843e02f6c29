"""Gradients of the norm family. Inference never loads their kernels.

The functions of :mod:`flashinfer.norm` are differentiable. These serve autograd functions of callers.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Gradient, no_second_derivative
from .jit.modules.norm_backward import gen_norm_backward_module

__all__ = ["gen_norm_backward_module", "layernorm_backward", "rmsnorm_backward"]


def _like_input_and_weight(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight.shape)


def _like_input_gamma_and_beta(
    grad: torch.Tensor, input: torch.Tensor, gemma: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), gemma.new_empty(gemma.shape), gemma.new_empty(gemma.shape)


_rmsnorm_backward = define(
    "rmsnorm_backward(Tensor grad, Tensor input, Tensor weight, Tensor? grad_sum, float eps, Tensor? eps_tensor,"
    " float weight_offset) -> (Tensor, Tensor)",
    gen_norm_backward_module,
    _like_input_and_weight,
    gradient=no_second_derivative("rmsnorm_backward"),
)
_layernorm_backward = define(
    "layernorm_backward(Tensor grad, Tensor input, Tensor gemma, float eps, Tensor? eps_tensor)"
    " -> (Tensor, Tensor, Tensor)",
    gen_norm_backward_module,
    _like_input_gamma_and_beta,
    gradient=no_second_derivative("layernorm_backward"),
)


def rmsnorm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`flashinfer.rmsnorm` with respect to ``input`` and ``weight``.

    Args:
        grad: the gradient of the result, of ``input``'s shape and dtype.
        input: ``[..., hidden_size]`` (float32, float16, bfloat16; on the CPU also float64).
        weight: ``[hidden_size]``, same dtype.
        eps: the norm's.
        weight_offset: 1 for :func:`flashinfer.gemma_rmsnorm`.

    Returns:
        ``(grad_input, grad_weight)``. ``grad_weight`` is a sum over rows in a fixed order: the same bits in
        every run on one device.

    Raises:
        ValueError: invalid shapes, strides or devices.
        TypeError: invalid dtypes.

    Elements, and sums over the rows of a block, are in float64 for float32 and in float32 for half types.
    """
    return _rmsnorm_backward(grad, input, weight, None, eps, None, weight_offset)  # type: ignore[no-any-return]


def layernorm_backward(
    grad: torch.Tensor, input: torch.Tensor, gemma: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`flashinfer.layernorm` with respect to ``input``, ``gemma`` and ``beta``.

    Args:
        grad, input, eps: as for :func:`rmsnorm_backward`, also errors.
        gemma: ``[hidden_size]``, float32 or of ``input``'s dtype.

    Returns:
        ``(grad_input, grad_gemma, grad_beta)``.
    """
    return _layernorm_backward(grad, input, gemma, eps, None)  # type: ignore[no-any-return]


def _save_rmsnorm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, ctx.eps, eps_tensor, _ = inputs
    ctx.save_for_backward(input, weight, eps_tensor)


def _save_fused_add_rmsnorm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, ctx.eps, eps_tensor, _ = inputs
    ctx.save_for_backward(output[1], weight, eps_tensor)


def _save_layernorm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, gemma, _, ctx.eps, eps_tensor = inputs
    ctx.save_for_backward(input, gemma, eps_tensor)


def rmsnorm_gradient(weight_offset: float) -> Gradient:
    """Return the gradient of ``(input, weight, eps, eps_tensor, enable_pdl) -> output``."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        input, weight, eps_tensor = ctx.saved_tensors
        grads = _rmsnorm_backward(grad.contiguous(), input, weight, None, ctx.eps, eps_tensor, weight_offset)
        return *grads, None, None, None

    return Gradient(_save_rmsnorm, backward)


def fused_add_rmsnorm_gradient(weight_offset: float) -> Gradient:
    """Return the gradient of ``(input, residual, weight, eps, eps_tensor, enable_pdl) -> (output, sum)``."""

    def backward(ctx: Any, grad: torch.Tensor, grad_sum: torch.Tensor) -> tuple[Any, ...]:
        total, weight, eps_tensor = ctx.saved_tensors
        more = grad_sum.contiguous()
        both, grad_weight = _rmsnorm_backward(
            grad.contiguous(), total, weight, more, ctx.eps, eps_tensor, weight_offset
        )
        return both, both, grad_weight, None, None, None

    return Gradient(_save_fused_add_rmsnorm, backward)


def layernorm_gradient() -> Gradient:
    """Return the gradient of ``(input, gemma, beta, eps, eps_tensor) -> output``."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        input, gemma, eps_tensor = ctx.saved_tensors
        return *_layernorm_backward(grad.contiguous(), input, gemma, ctx.eps, eps_tensor), None, None

    return Gradient(_save_layernorm, backward)
