"""Gradients of gated activations. Inference never loads their kernels.

The functions of :mod:`flashinfer.activation` are differentiable. These serve autograd functions of callers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Gradient, no_second_derivative
from .jit.modules.activation import ACTIVATIONS
from .jit.modules.activation_backward import gen_act_and_mul_backward_module

__all__ = [
    "gelu_and_mul_backward",
    "gelu_tanh_and_mul_backward",
    "gen_act_and_mul_backward_module",
    "silu_and_mul_backward",
]


def _like_input(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape)


_OPERATORS = {
    name: define(
        f"{name}_and_mul_backward(Tensor grad, Tensor input) -> Tensor",
        partial(gen_act_and_mul_backward_module, name),
        _like_input,
        gradient=no_second_derivative(f"{name}_and_mul_backward"),
    )
    for name in ACTIVATIONS
}


def silu_and_mul_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the gradient of :func:`flashinfer.silu_and_mul` with respect to ``input``.

    Args:
        grad: ``[..., d]``, the gradient of the result; ``input``'s dtype.
        input: ``[..., 2 * d]`` (float32, float16, bfloat16; on the CPU also float64); any strides of leading
            dimensions that three dimensions can express, also for ``grad``.

    Returns:
        ``[..., 2 * d]``, contiguous.

    Raises:
        ValueError: an odd last dimension, invalid shapes, strides or devices.
        TypeError: invalid dtypes.

    Elements are computed in float64 for float32 and in float32 for half types, and rounded once.
    """
    return _OPERATORS["silu"](grad, input)  # type: ignore[no-any-return]


def gelu_tanh_and_mul_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the gradient of :func:`flashinfer.gelu_tanh_and_mul`, as :func:`silu_and_mul_backward`."""
    return _OPERATORS["gelu_tanh"](grad, input)  # type: ignore[no-any-return]


def gelu_and_mul_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the gradient of :func:`flashinfer.gelu_and_mul`, as :func:`silu_and_mul_backward`."""
    return _OPERATORS["gelu"](grad, input)  # type: ignore[no-any-return]


def act_and_mul_gradient(name: str) -> Gradient:
    """Return the gradient of ``(input, enable_pdl) -> output``."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (input,) = ctx.saved_tensors
        return _OPERATORS[name](grad.contiguous(), input), None

    return Gradient(setup_context, backward)
