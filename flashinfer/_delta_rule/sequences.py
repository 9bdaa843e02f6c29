"""The delta rule over whole sequences, with computed gates."""

from __future__ import annotations

import torch

from .._ops.scalars import scalar
from ..delta_rule_backward import state_dtype
from ..jit.spec import BACKENDS
from .arguments import Checkpoints, check_logarithms, checked_scale, dense, indices, numbers, promoted
from .operators import delta_rule, delta_rule_checkpoints


def run_sequences(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gk: torch.Tensor | None,
    beta: torch.Tensor | None, scale: float | None, initial_state: torch.Tensor | None, output_final_state: bool,
    l2norm: bool, cu_seqlens: torch.Tensor | None, v_first: bool, chunked: bool, checkpoints: Checkpoints | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return outputs, and final states or ``None``. Gates and beta have the states' dtype."""
    number = checked_scale(function, q, scale)
    if q.device.type in BACKENDS and torch.is_autocast_enabled(q.device.type):
        q, k, v = (one.to(torch.get_autocast_dtype(q.device.type)) for one in (q, k, v))
    dtype_of_v = v.dtype
    q, k, v = promoted(q, k, v)
    check_logarithms(function, "g", g)
    check_logarithms(function, "gk", gk)
    state = numbers(function, "initial_state", initial_state, state_dtype(q))
    tensors = dense(q), dense(k), dense(v), g, gk, beta, state, indices(function, "cu_seqlens", cu_seqlens)
    options = output_final_state, l2norm, v_first, chunked
    if checkpoints is None:
        o, final = delta_rule(*tensors, number, *options)
    else:
        o, final = delta_rule_checkpoints(*tensors, *checkpoints, *scalar(number, q.device), *options)
    return o.to(dtype_of_v), final if output_final_state else None
