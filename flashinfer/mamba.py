"""Mamba: the decoding step of its state space model, on a pool of states that changes in place.

For each token of a sequence, each head and each row of the head's state::

    d = softplus(dt + dt_bias);  s = exp(d A) s + d x B;  y = s . C + D x;  y = y silu(z)
"""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.errors import value_error
from ._ops.numbers import check_option, check_range
from ._ops.route import without_gradient
from ._ops.tensors import check_tensor
from .jit.modules.mamba import gen_mamba_module

__all__ = ["gen_mamba_module", "selective_state_update"]

_NAME = "selective_state_update"
ALGORITHMS = ("auto", "simple", "vertical", "horizontal")

_update = define(
    f"{_NAME}(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
    " Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices, int pad_slot_id,"
    " Tensor(b!) out, bool update_state, Tensor(c!)? intermediate_states_buffer, Tensor? intermediate_state_indices,"
    " Tensor? rand_seed, int philox_rounds, Tensor? cu_seqlens, Tensor? num_accepted_tokens,"
    " Tensor(d!)? state_scale, Tensor(e!)? intermediate_state_scales) -> ()",
    gen_mamba_module,
    fallback=without_gradient(_NAME, "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out"),
    needs=lambda spec, _, x, *rest: {"dtype": (str(x.dtype).removeprefix("torch."),)},
)


def _rank(name: str, tensor: torch.Tensor, wanted: int, heads: bool) -> torch.Tensor:
    """Return a tensor with a dimension of heads, which is added for states without heads."""
    check_tensor(_NAME, name, tensor)
    check_range(_NAME, name, tensor.dim(), wanted, wanted, "dimensions", " with this state and x")
    if heads:
        return tensor
    return tensor.unsqueeze(0) if name in ("A", "D", "dt_bias") else tensor.unsqueeze(-2)


def _row_scales(scales: torch.Tensor | None, heads: bool) -> torch.Tensor | None:
    """Return the scales of int16 states as ``[slots, heads, dim]``."""
    if scales is None:
        return None
    check_tensor(_NAME, "state_scale", scales)
    if scales.dim() == 3 + heads and scales.shape[-1] == 1:
        scales = scales.squeeze(-1)
    check_range(_NAME, "state_scale", scales.dim(), 2 + heads, 2 + heads, "dimensions", " with this state")
    return scales if heads else scales.unsqueeze(1)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take one token of each sequence, or a few, into states of Mamba or Mamba-2, in float32.

    Args:
        state: ``[slots, heads, dim, dstate]``, float32, float16, bfloat16, or int16 with ``state_scale``. Slots
            are contiguous; dstate is at most 256. Changed in place.
        x: ``[batch, heads, dim]``, ``[batch, T, heads, dim]``, or ``[total_tokens, heads, dim]`` with
            ``cu_seqlens``; float32, float16 or bfloat16, the last dimension contiguous.
        dt: x's shape, any float dtype and strides. If dt, A and dt_bias have stride 0 in their last
            dimensions, as in Mamba-2, a head has one decay. Otherwise each element of a state has its own.
        A: ``[heads, dim, dstate]``.
        B, C: as x, with ``[groups, dstate]`` last; heads are a multiple of groups. x's dtype.
        D, dt_bias: ``[heads, dim]``, or ``None``. D has dt's dtype.
        z: as x, a gate, or ``None``.
        dt_softplus: the step is ``softplus(dt + dt_bias)``.
        state_batch_indices: ``[sequences]``, int32 or int64, the slot of each sequence's state; ``None``: its
            number. ``[sequences, columns]``: the first column, or with ``num_accepted_tokens`` the one of the
            last accepted token.
        pad_slot_id: a slot for padding. With it, or with an invalid slot, the state before the first token is 0,
            and no state is written.
        state_scale: ``[slots, heads, dim]`` or ``[slots, heads, dim, 1]``, float32, of int16 states. A row of a
            state is ``state * state_scale``. A written row gets the scale ``max(abs(row)) / 32767``; rows below
            1e-30 become 0. Changed in place.
        out: like x; allocated by default.
        disable_state_update: leave the pool unchanged.
        intermediate_states_buffer: ``[buffers, cache_steps, heads, dim, dstate]``, contiguous, of the state's
            dtype, receives the state after each token.
        intermediate_state_indices: ``[sequences]``, the buffer of each, of the dtype of ``state_batch_indices``;
            ``None``: the number of its slot.
        intermediate_state_scales: ``[buffers, cache_steps, heads, dim]``, contiguous, float32, receives the
            scales of int16 states in ``intermediate_states_buffer``.
        rand_seed: ``[1]`` int64: float states of 16 bits are rounded up or down at random, so that their
            expectation is exact.
        philox_rounds: rounds of the random numbers, 1 to 10.
        cache_steps: columns of the indices or steps of the buffer. Their shapes define it.
        algorithm: ``"auto"``, ``"simple"``, ``"vertical"`` or ``"horizontal"``: accepted, one kernel serves
            all.
        dst_state_batch_indices: slots of the last states; ``None``: as ``state_batch_indices``.
        cu_seqlens: ``[sequences + 1]``, int32 or int64, offsets of consecutive sequences. On CUDA the host
            never reads its values.
        num_accepted_tokens: ``[sequences]``, of the previous step: the state is read from column
            ``num_accepted_tokens - 1`` of ``state_batch_indices``, and the state after token t goes to column
            t.

    A state may have no heads, ``[slots, dim, dstate]``. Then x is ``[batch, dim]``, A ``[dim, dstate]``, B
    and C ``[batch, dstate]``, D and dt_bias ``[dim]``.

    Returns:
        ``out``, of x's shape.

    Raises:
        ValueError: invalid shapes, strides or devices; scales without int16 states, or missing ones; dtypes of D
            or of ``intermediate_state_indices`` that differ from those of their neighbours.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient.

    Source: Dao, Gu: Transformers are SSMs, 2024.
    """
    check_option(_NAME, "algorithm", algorithm, ALGORITHMS)
    for name, tensor in (("state", state), ("x", x)):
        check_tensor(_NAME, name, tensor)
    if state.dim() not in (3, 4):
        raise value_error(_NAME, "state", f"{state.dim()} dimensions", "4, or 3 without heads")
    heads = state.dim() == 4
    rank = x.dim()
    if rank not in ((3, 4) if heads and cu_seqlens is None else (3,) if heads else (2,)):
        raise value_error(_NAME, "x", f"{rank} dimensions", "3, or 4 without cu_seqlens, or 2 with a state of 3")
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out

    def tokens(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = _rank(name, tensor, rank, heads)
        return tensor if rank == 4 else tensor.unsqueeze(0 if cu_seqlens is not None else 1)

    def of_heads(name: str, tensor: torch.Tensor | None, wanted: int) -> torch.Tensor | None:
        return None if tensor is None else _rank(name, tensor, wanted - (not heads), heads)

    _update(
        state if heads else state.unsqueeze(1), tokens("x", x), tokens("dt", dt), of_heads("A", A, 3), tokens("B", B),
        tokens("C", C), of_heads("D", D, 2), None if z is None else tokens("z", z), of_heads("dt_bias", dt_bias, 2),
        dt_softplus, state_batch_indices, dst_state_batch_indices, pad_slot_id, tokens("out", result),
        not disable_state_update, intermediate_states_buffer, intermediate_state_indices, rand_seed, philox_rounds,
        cu_seqlens, num_accepted_tokens, _row_scales(state_scale, heads), intermediate_state_scales,
    )  # fmt: skip
    return result
