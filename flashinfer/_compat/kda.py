"""Kimi Delta Attention: the function of :mod:`flashinfer.kda`."""

from __future__ import annotations

from typing import Any

import torch

from .._delta_rule.arguments import channel_gate, check_logarithms, check_rows, check_tokens
from .._ops.arguments import check_not_both, check_present
from .._ops.errors import renamed
from .._ops.tensors import check_metadata
from ..delta_rule import delta_rule_step, fused_recurrent_kda

__all__ = ["recurrent_kda"]

_NAME = "recurrent_kda"


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take tokens of each sequence into states that change in place.

    There is no gradient; :func:`flashinfer.delta_rule.fused_recurrent_kda` has one.

    Args:
        q, k: ``[B, T, H, K]`` (float16, bfloat16, float32); ``[1, T, H, K]`` with ``cu_seqlens``.
        v: ``[B, T, HV, V]``, same dtype.
        g: ``[B, T, HV, K]``, any float dtype, natural logarithms of decays, at most 0.
        beta: ``[B, T, HV]``; logits with ``beta_is_logit``.
        use_gate_in_kernel, A_log, dt_bias, lower_bound: g is raw, as in ``fused_recurrent_kda``.
        initial_state: ``[B, HV, V, K]``, float32, float16 or bfloat16, changed in place; ``None``: float32
            zeros. With ``ssm_state_indices`` a pool ``[slots, HV, V, K]``.
        output_final_state: return the states.
        use_qk_l2norm_in_kernel: normalise q and k (default).
        cu_seqlens: ``[N + 1]``, consecutive sequences with states ``[N, HV, V, K]`` and no indices.
        ssm_state_indices: ``[B]``, slots that are read and written. With an invalid slot, such as a negative
            one, o is 0 and nothing is written.
        initial_state_source, initial_state_indices: other names of a pool and its slots.
        output: ``[B, T, HV, V]``, written and returned.

    Returns:
        ``(output, states or None)``.

    Raises:
        ValueError, TypeError: as :func:`flashinfer.delta_rule.delta_rule_step`.
        GradientError: a tensor requires a gradient.
    """
    check_tokens(_NAME, q, k, v)
    check_not_both(_NAME, "initial_state_source", initial_state_source, "initial_state", initial_state)
    check_not_both(_NAME, "initial_state_indices", initial_state_indices, "ssm_state_indices", ssm_state_indices)
    state = initial_state if initial_state_source is None else initial_state_source
    slots = ssm_state_indices if initial_state_indices is None else initial_state_indices
    if slots is not None:
        check_present(_NAME, "initial_state", state, "the pool of the indices")
    check_not_both(_NAME, "ssm_state_indices", slots, "cu_seqlens", cu_seqlens)
    numbers = torch.float64 if q.dtype == torch.float64 else torch.float32
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, v.shape[2], v.shape[3], q.shape[3])
    if state is None:
        state = q.new_zeros(shape, dtype=numbers)
    if cu_seqlens is not None:
        halves = () if numbers == torch.float64 else (torch.float16, torch.bfloat16)
        check_metadata(_NAME, "initial_state", state, shape, v.device, numbers, *halves)
        if output is not None:
            check_metadata(_NAME, "output", output, v.shape, v.device, v.dtype)
        with torch.no_grad():
            o, final = fused_recurrent_kda(
                q, k, v, g, beta, A_log, dt_bias, scale, state, True, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                beta_is_logit, False, lower_bound, True, cu_seqlens,
            )  # fmt: skip
        assert final is not None
        state.copy_(final)
        o = o if output is None else output.copy_(o)
    else:
        gate: dict[str, Any] = {"gk": g}
        if A_log is None or numbers == torch.float64:  # the kernel would read raw float64 gates in float32
            gate["gk"] = channel_gate(_NAME, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, numbers)
            check_logarithms(_NAME, "g", gate["gk"])
        else:
            check_rows(_NAME, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
            gate |= {"A_log": A_log.reshape(-1), "dt_bias": dt_bias, "lower_bound": lower_bound}
        try:
            o = delta_rule_step(
                q, k, v, state, None, beta, **gate, beta_is_logit=beta_is_logit, scale=scale,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True, state_indices=slots, out=output,
            )  # fmt: skip
        except (ValueError, TypeError) as err:
            pool = "initial_state" if initial_state_source is None else "initial_state_source"
            indices = "ssm_state_indices" if initial_state_indices is None else "initial_state_indices"
            names = {"gk": "g", "state": pool, "state_indices": indices, "out": "output"}
            raise renamed(err, names) from None
    return o, state if output_final_state else None
