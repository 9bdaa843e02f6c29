"""Gradients of the delta rule. Inference never loads their kernels.

The functions of :mod:`flashinfer.delta_rule` are differentiable. The forward pass saves only its inputs, and
the gradient's kernel recomputes everything else.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Gradient, no_second_derivative
from .jit.modules.delta_rule_backward import gen_delta_rule_backward_module

__all__ = ["gen_delta_rule_backward_module"]

# Inputs of the delta rule's operators, in this order.
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens"


def state_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype of states, gates and beta for these q, k and v."""
    return torch.float64 if any(getattr(one, "dtype", None) == torch.float64 for one in tensors) else torch.float32


def new_states(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, wanted: bool, v_first: bool
) -> torch.Tensor:
    """Allocate a state for each sequence and value head if ``wanted``, otherwise an empty tensor."""
    count = (q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1) if wanted else 0
    rows = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    return q.new_empty((count, v.shape[2], *rows), dtype=state_dtype(q))


def _like_inputs(
    grad_o: Any, grad_state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    gk: torch.Tensor | None, beta: torch.Tensor | None, initial_state: Any, cu_seqlens: torch.Tensor | None,
    scale: float, scale_tensor: Any, l2norm: bool, v_first: bool, chunked: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    def like(tensor: torch.Tensor | None) -> torch.Tensor:
        return q.new_empty((0,), dtype=state_dtype(q)) if tensor is None else tensor.new_empty(tensor.shape)

    return like(q), like(k), like(v), like(g), like(gk), like(beta), new_states(q, v, cu_seqlens, True, v_first)


_backward = define(
    f"delta_rule_backward(Tensor? grad_o, Tensor? grad_state, {INPUTS}, float scale, Tensor? scale_tensor, bool l2norm,"
    " bool v_first, bool chunked) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gen_delta_rule_backward_module,
    _like_inputs,
    gradient=no_second_derivative("delta_rule_backward"),
)


def delta_rule_gradient() -> Gradient:
    """Return the gradient of ``(INPUTS, scale, scale_tensor, final_state, l2norm, v_first, chunked)``."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.scale, scale_tensor, ctx.final_state, ctx.l2norm, ctx.v_first, ctx.chunked = inputs
        ctx.save_for_backward(*tensors, scale_tensor)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad_o: torch.Tensor | None, grad_state: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, scale_tensor = ctx.saved_tensors
        if grad_o is None and grad_state is None:
            return (None,) * 14
        *grads, grad_initial = _backward(
            None if grad_o is None else grad_o.contiguous(),
            grad_state.contiguous() if ctx.final_state and grad_state is not None else None,
            *tensors, ctx.scale, scale_tensor, ctx.l2norm, ctx.v_first, ctx.chunked,
        )  # fmt: skip
        grads = [*grads, grad_initial]
        present = (grad if one is not None else None for grad, one in zip(grads, tensors, strict=False))
        return (*present, None, None, None, None, None, None, None)

    return Gradient(setup_context, backward)
