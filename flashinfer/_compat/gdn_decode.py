"""Steps of Gated DeltaNet: the functions of :mod:`flashinfer.gdn_decode`."""

from __future__ import annotations

import warnings

import torch

from .._delta_rule.arguments import check_rank, check_tokens, indices
from .._ops.arguments import check_not_both
from .._ops.errors import renamed, type_error, value_error
from .._ops.numbers import check_option
from .._ops.sizes import differs
from .._ops.tensors import check_metadata
from ..delta_rule import delta_rule_step

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"]


# An argument of delta_rule_step -> its name here. `state` has the name of ``pool`` if that is not empty.
_NAMES = {
    "g": "a", "beta": "b", "out": "output", "state_indices": "initial_state_indices",
    "output_indices": "output_state_indices", "snapshots": "intermediate_states_buffer",
    "use_qk_l2norm_in_kernel": "use_qk_l2norm",
}  # fmt: skip


def _step(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor | None, A_log: torch.Tensor,
    a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor, scale: float | None, output: torch.Tensor | None,
    use_qk_l2norm: bool, v_first: bool, backend: str, indices: torch.Tensor | None = None,
    output_indices: torch.Tensor | None = None, snapshots: torch.Tensor | None = None, update: bool = True,
    pool: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_tokens(name, q, k, v)
    check_option(name, "backend", backend, ("auto", "flashinfer"))
    if state is None:
        raise type_error(name, "state", None, "Tensor")
    try:
        o = delta_rule_step(
            q, k, v, state, a, b, A_log=A_log, dt_bias=dt_bias, beta_is_logit=True, scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm, state_v_first=v_first, state_indices=indices,
            output_indices=output_indices, snapshots=snapshots, update_state=update, out=output,
        )  # fmt: skip
    except (ValueError, TypeError) as err:
        raise renamed(err, _NAMES | ({"state": pool} if pool else {})) from None
    return o, state


def _check_pool(name: str, pool: torch.Tensor, indices: torch.Tensor | None, sequences: int) -> None:
    """Check that a pool without indices has exactly the states of the sequences."""
    if indices is None and differs(pool.shape[0], sequences):
        got = f"None for a pool of {pool.shape[0]}"
        raise value_error(name, "initial_state_indices", got, f"slots of {sequences} sequences")


def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token of each sequence. States ``[B, HV, K, V]`` change in place.

    Args:
        q, k: ``[B, 1, H, K]`` (float16, bfloat16, float32).
        v: ``[B, 1, HV, V]``, same dtype.
        state: float32.
        A_log, dt_bias: ``[HV]``.
        a, b: ``[B, 1, HV]``: the decay and beta before their activations.
        output: ``[B, 1, HV, V]``.
        use_qk_l2norm: normalise q and k (default).

    Returns:
        ``(output, state)``.

    Raises:
        ValueError, TypeError: as :func:`flashinfer.delta_rule.delta_rule_step`.
    """
    name = "gated_delta_rule_decode"
    return _step(name, q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, False, backend)


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token of each sequence or more.

    States ``[B, HV, V, K]``, or a pool of them, change in place.

    Args:
        state: ``[B, HV, V, K]``, float32, float16 or bfloat16; ``None`` with ``initial_state``.
        initial_state: ``[slots, HV, V, K]``, the pool.
        initial_state_indices: ``[B]``, slots that are read and written. With an invalid slot, such as a
            negative one, o is 0 and nothing is written. ``None``: slot b.
        output_state_indices: ``[B]``, slots that are written instead; invalid ones are not written.
        intermediate_states_buffer: ``[B, at least T, HV, V, K]``, receives the state after each token.
        disable_state_update: leave the states unchanged.
        others: as in :func:`gated_delta_rule_decode`, also results and errors; T may be larger than 1.
    """
    name = "gated_delta_rule_decode_pretranspose"
    check_not_both(name, "initial_state", initial_state, "state", state)
    if initial_state is not None and output_state_indices is None:
        check_rank(name, 4, "", q=q, initial_state=initial_state)
        _check_pool(name, initial_state, initial_state_indices, q.shape[0])
    return _step(
        name, q, k, v, initial_state if state is None else state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        True, backend, initial_state_indices, output_state_indices, intermediate_states_buffer, not disable_state_update,
        "initial_state" if state is None else "",
    )  # fmt: skip


def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode several draft tokens of each sequence, on a pool of states ``[slots, HV, V, K]``.

    Args:
        q, k: ``[B, T, H, K]`` (float16, bfloat16, float32).
        v: ``[B, T, HV, V]``, same dtype.
        initial_state: float32, float16 or bfloat16, the pool.
        initial_state_indices: ``[B]``, slots that are read. With an invalid slot, such as a negative one, o
            is 0 and nothing is written. ``None``: slot b of a pool of B, but not with ``ssm_state_indices``.
        A_log, dt_bias: ``[HV]``.
        a, b: ``[B, T, HV]``: the decay and beta before their activations.
        output: ``[B, T, HV, V]``.
        intermediate_states_buffer: ``[at least B, at least T, HV, V, K]``, receives the state after each
            token.
        ssm_state_indices: ``[B, T]``, slots that receive the state after each token; not with a buffer. After
            an invalid slot, o of the next tokens is 0 and nothing is written. Sequences' own slots stay
            unchanged.
        disable_state_update: leave the slots unchanged. ``None`` warns, and means ``True``.
        use_qk_l2norm: normalise q and k (default).

    Returns:
        ``(output, initial_state)``.

    Raises:
        ValueError, TypeError: as :func:`flashinfer.delta_rule.delta_rule_step`.
    """
    name = "gated_delta_rule_mtp"
    check_tokens(name, q, k, v)
    if disable_state_update is None:
        text = f"{name}: disable_state_update: got None, which is True and will be False: say which"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        disable_state_update = True
    gates = (A_log, a, dt_bias, b)
    check_rank(name, 4, "", initial_state=initial_state)
    if ssm_state_indices is None:
        _check_pool(name, initial_state, initial_state_indices, q.shape[0])
        buffer = None if intermediate_states_buffer is None else intermediate_states_buffer[: q.shape[0]]
        return _step(
            name, q, k, v, initial_state, *gates, scale, output, use_qk_l2norm, True, backend, initial_state_indices,
            None, buffer, not disable_state_update, "initial_state",
        )  # fmt: skip
    buffers = ("intermediate_states_buffer", intermediate_states_buffer)
    check_not_both(name, "ssm_state_indices", ssm_state_indices, *buffers)
    each = indices(name, "ssm_state_indices", ssm_state_indices)
    first = indices(name, "initial_state_indices", initial_state_indices)
    for argument, tensor, table, shape in (
        ("ssm_state_indices", ssm_state_indices, each, q.shape[:2]),
        ("initial_state_indices", initial_state_indices, first, q.shape[:1]),
    ):
        check_metadata(name, argument, tensor if table is None else table, shape, q.device, torch.int32, torch.int64)
    assert each is not None and first is not None
    if output is not None:
        check_metadata(name, "output", output, v.shape, v.device, v.dtype)
    check_option(name, "disable_state_update", disable_state_update, (True,), " with ssm_state_indices")
    # Each token reads the slot that the previous token wrote. A sequence whose state is lost has none from
    # there on.
    slots = torch.cat([first[None], each.t()])
    lost = ((slots < 0) | (slots >= initial_state.shape[0])).cumsum(0) > 0
    slots = slots.masked_fill(lost, -1)
    parts = []
    for t in range(q.shape[1]):
        one = slice(t, t + 1)
        o, _ = _step(
            name, q[:, one], k[:, one], v[:, one], initial_state, A_log, a[:, one], dt_bias, b[:, one], scale, None,
            use_qk_l2norm, True, backend, slots[t], slots[t + 1], pool="initial_state",
        )  # fmt: skip
        parts.append(o)
    result = torch.cat(parts, 1) if parts else v.new_empty(v.shape)
    return result if output is None else output.copy_(result), initial_state
