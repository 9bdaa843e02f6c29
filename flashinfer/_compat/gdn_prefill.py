"""Prefill of Gated DeltaNet in the conventions of :mod:`flashinfer.gdn_prefill`."""

from __future__ import annotations

import torch

from .._delta_rule.arguments import check_floats, check_rank
from .._ops.errors import value_error
from .._ops.numbers import check_option, whole
from .._ops.tensors import check_metadata, is_readable
from ..delta_rule import chunk_gated_delta_rule as _by_tokens
from ..errors import UnsupportedError

__all__ = ["chunk_gated_delta_rule"]

_NAME, _BY_TOKENS = "chunk_gated_delta_rule", "flashinfer.delta_rule.chunk_gated_delta_rule"


def _error(argument: str, got: object, wanted: str) -> ValueError:
    return value_error(_NAME, argument, got, wanted)


def _refuse(
    checkpoints: torch.Tensor | None, starts: torch.Tensor | None, every: int, use_cp: str | bool,
    state_indices: torch.Tensor | None,
) -> None:  # fmt: skip
    """Reject invalid arguments first, and then those that have no kernel."""
    tables = {"state_checkpoints": checkpoints, "checkpoint_cu_starts": starts}
    if whole(_NAME, "checkpoint_every_n_tokens", every) < 0 or every % 64:
        raise _error("checkpoint_every_n_tokens", every, "0 or a positive multiple of 64")
    for name, tensor in tables.items():
        if (tensor is None) != (every == 0):
            wanted = "None with checkpoint_every_n_tokens=0" if every == 0 else f"a tensor for every {every} tokens"
            raise _error(name, type(tensor).__name__, wanted)
    check_option(_NAME, "use_cp", use_cp, ("auto", True, False))
    for name, unsupported in {
        "checkpoint_every_n_tokens": every != 0, "use_cp": use_cp is True, "state_indices": state_indices is not None,
    }.items():  # fmt: skip
        if unsupported:
            raise UnsupportedError(f"{_NAME}: {name}: has no kernel here; leave it at its default")


def _heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``[T, h, n]`` as ``[1, T, count, n]``. Each head is repeated as often as it is read."""
    return (tensor if tensor.shape[1] == count else tensor.repeat_interleave(count // tensor.shape[1], 1))[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule over packed sequences.

    Args:
        q: ``[T, Hq, K]`` (float32, float16, bfloat16).
        k: ``[T, Hk, K]``, same dtype; Hq and Hk divide the number of state heads.
        v: ``[T, Hv, V]``, same dtype. States and the result have ``max(Hq, Hv)`` heads.
        g: ``[T, H]``, decays in (0, 1], of any float dtype; ``None``: 1. On the CPU other numbers are an
            error; on CUDA they are not read.
        beta: ``[T, H]``, of any float dtype; ``None``: 1.
        scale: ``None``: ``K ** -0.5``.
        initial_state: ``[N, H, V, K]``, float32, float16 or bfloat16; ``None``: zeros.
        output_final_state: also return the final states.
        cu_seqlens: ``[N + 1]`` integers, required.
        use_qk_l2norm_in_kernel: as in :func:`flashinfer.delta_rule.chunk_gated_delta_rule`.
        output: ``[T, H, V]`` of v's dtype, written and returned.
        output_state: ``[N, H, V, K]``, float32, float16 or bfloat16, written and returned. ``None``:
            allocated in initial_state's dtype, or in float32 without one.
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens: states within sequences. They have
            no kernel: ``None`` and 0.
        use_cp: ``"auto"`` or ``False``. ``True`` requests a split of sequences, which has no kernel.
        state_indices: slots of a pool, which have no kernel: ``None``.
        backend: ``"auto"`` or ``"flashinfer"``, which are the same.
        _cp_chunk_len, max_seqlen: unused hints.

    Returns:
        The output, or ``(output, state)``.

    Raises:
        ValueError: invalid shapes or values.
        TypeError: invalid dtypes.
        UnsupportedError: checkpoints, ``state_indices`` or ``use_cp=True``.
    """
    check_rank(_NAME, 3, f", or four in {_BY_TOKENS}", q=q, k=k, v=v)
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None:
            check_rank(_NAME, 2, f", or three in {_BY_TOKENS}", **{name: gate})
            check_floats(_NAME, name, gate)
    _refuse(state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, use_cp, state_indices)
    check_option(_NAME, "backend", backend, ("auto", "flashinfer"))
    if cu_seqlens is None:
        raise _error("cu_seqlens", None, "offsets of the sequences")
    count = max(q.shape[1], v.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0 or count % tensor.shape[1]:
            raise _error(name, f"{tensor.shape[1]} heads", f"a divisor of {count}")
    if g is not None and is_readable(g) and bool(((g < 0) | (g > 1)).any()):
        raise _error("g", "numbers outside [0, 1]", f"decays themselves; {_BY_TOKENS} takes their logarithms")
    numbers = torch.float64 if q.dtype == torch.float64 else torch.float32
    log = v.new_zeros((1, v.shape[0], count), dtype=numbers) if g is None else g.to(numbers).log()[None]
    factor = v.new_ones((1, v.shape[0], count), dtype=numbers) if beta is None else beta[None]
    o, state = _by_tokens(
        q[None] if k.shape == q.shape else _heads(q, count),
        k[None] if k.shape == q.shape else _heads(k, count),
        _heads(v, count), log, factor, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        state_v_first=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    o = o[0]
    if output is not None:
        check_metadata(_NAME, "output", output, o.shape, o.device, o.dtype)
    if state is not None and output_state is None:
        output_state = state if initial_state is None else state.to(initial_state.dtype)
    elif state is not None and output_state is not None:
        halves = () if state.dtype == torch.float64 else (torch.float16, torch.bfloat16)
        check_metadata(_NAME, "output_state", output_state, state.shape, state.device, state.dtype, *halves)
        output_state.copy_(state)
    o = o if output is None else output.copy_(o)
    return o if state is None or output_state is None else (o, output_state)
