"""Operators of the delta rule."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.declare import define
from .._ops.route import Fallback, without_gradient
from .._ops.scalars import scalar
from ..delta_rule_backward import INPUTS, delta_rule_gradient, new_states
from ..jit.modules.delta_rule import gen_delta_rule_module


def _outputs(
    q: torch.Tensor, k: Any, v: torch.Tensor, g: Any, gk: Any, beta: Any, initial_state: Any,
    cu_seqlens: torch.Tensor | None, scale: float, final_state: bool, l2norm: bool, v_first: bool,
    chunked: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return v.new_empty(v.shape), new_states(q, v, cu_seqlens, final_state, v_first)


def _outputs_of_autograd(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(*args[:9], *args[10:])


delta_rule_autograd = define(
    f"delta_rule_autograd({INPUTS}, float scale, Tensor? scale_tensor, bool final_state, bool l2norm, bool v_first, bool chunked)"
    " -> (Tensor, Tensor)",
    gen_delta_rule_module,
    _outputs_of_autograd,
    gradient=delta_rule_gradient(),
)


def _fallback(*args: Any) -> Any:
    return delta_rule_autograd(*args[:8], *scalar(args[8], args[0].device), *args[9:])


delta_rule = define(
    f"delta_rule({INPUTS}, float scale, bool final_state, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor)",
    gen_delta_rule_module,
    _outputs,
    fallback=Fallback(_fallback, ("q", "k", "v", "g", "gk", "beta", "initial_state"), ("scale",)),
)

delta_rule_checkpoints = define(
    f"delta_rule_checkpoints({INPUTS}, Tensor(a!) checkpoints, Tensor checkpoint_starts, int checkpoint_every, float scale,"
    " Tensor? scale_tensor, bool final_state, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor)",
    gen_delta_rule_module,
    lambda *args: _outputs(*args[:8], *args[11:12], *args[13:]),
    fallback=without_gradient("delta_rule_checkpoints", "q", "k", "v", "g", "gk", "beta", "initial_state"),
)

_STEP = "Tensor? state_indices, Tensor? output_indices, Tensor(b!)? snapshots"
delta_rule_step = define(
    "delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? g, Tensor? gk, Tensor? beta, Tensor? A_log,"
    f" Tensor? dt_bias, {_STEP}, float scale, Tensor? scale_tensor, float lower_bound, int beta_sigmoid, bool l2norm,"
    " bool v_first, bool update_state) -> Tensor",
    gen_delta_rule_module,
    lambda q, k, v, *_: v.new_empty(v.shape),
    fallback=without_gradient("delta_rule_step", "q", "k", "v", "state", "g", "gk", "beta", "A_log", "dt_bias"),
)
