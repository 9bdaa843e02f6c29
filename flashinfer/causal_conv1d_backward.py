"""Gradients of the causal convolution. Inference never loads their kernels.

:func:`flashinfer.causal_conv1d_fn` is differentiable. The forward pass saves only its inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Gradient, no_second_derivative
from .jit.modules.causal_conv1d_backward import gen_causal_conv1d_backward_module

__all__ = ["gen_causal_conv1d_backward_module"]

# Inputs of the operators, in this order. x is channels-last.
INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens"


def new_conv_states(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor | None, wanted: bool
) -> torch.Tensor:
    """Allocate a state for each sequence if ``wanted``, otherwise an empty tensor."""
    count = (x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1) if wanted else 0
    return x.new_empty((count, x.shape[2], weight.shape[1] - 1))


def _like_inputs(
    grad_out: Any, grad_final: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    initial_states: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty((0 if bias is None else x.shape[2],)),
        new_conv_states(x, weight, cu_seqlens, initial_states is not None),
    )


_backward = define(
    f"causal_conv1d_backward(Tensor? grad_out, Tensor? grad_final, {INPUTS}, bool silu)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    gen_causal_conv1d_backward_module,
    _like_inputs,
    gradient=no_second_derivative("causal_conv1d_backward"),
)


def causal_conv1d_gradient() -> Gradient:
    """Return the gradient of ``(INPUTS, final_states, silu) -> (out, final_states)``."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.final_states, ctx.silu = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_final: torch.Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if grad_out is None and (grad_final is None or not ctx.final_states):
            return (None,) * 7
        grads = _backward(
            None if grad_out is None else grad_out.contiguous(),
            grad_final.contiguous() if ctx.final_states and grad_final is not None else None,
            *tensors, ctx.silu,
        )  # fmt: skip
        present = (grad if one is not None else None for grad, one in zip(grads, tensors, strict=False))
        return (*present, None, None, None)

    return Gradient(setup_context, backward)
