"""Gradients of the gated norm. Inference never loads their kernels.

:func:`flashinfer.gated_rmsnorm` is differentiable. The forward pass saves only its inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Gradient, no_second_derivative
from .jit.modules.gated_norm_backward import gen_gated_norm_backward_module

__all__ = ["gen_gated_norm_backward_module"]


def _like_inputs(
    grad: torch.Tensor, input: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


_backward = define(
    "gated_rmsnorm_backward(Tensor grad, Tensor input, Tensor gate, Tensor weight, float eps, Tensor? eps_tensor,"
    " int group_size, bool sigmoid, bool norm_before_gate) -> (Tensor, Tensor, Tensor)",
    gen_gated_norm_backward_module,
    _like_inputs,
    gradient=no_second_derivative("gated_rmsnorm_backward"),
)


def gated_rmsnorm_gradient() -> Gradient:
    """Return the gradient of gated_rmsnorm's operator with respect to input, gate and weight."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.eps, eps_tensor, ctx.group_size, ctx.sigmoid, ctx.norm_before_gate = inputs
        ctx.save_for_backward(*tensors, eps_tensor)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *tensors, eps_tensor = ctx.saved_tensors
        grads = _backward(
            grad.contiguous(), *tensors, ctx.eps, eps_tensor, ctx.group_size, ctx.sigmoid, ctx.norm_before_gate
        )
        return (*grads, None, None, None, None, None)

    return Gradient(setup_context, backward)
