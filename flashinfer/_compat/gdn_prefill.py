"""Prefill of Gated DeltaNet in the conventions of :mod:`flashinfer.gdn_prefill`."""

from __future__ import annotations

import torch

from .._delta_rule.arguments import check_floats, check_rank, checkpoints_of, indices, numbers
from .._delta_rule.sequences import run_sequences
from .._ops.errors import value_error
from .._ops.numbers import check_option
from .._ops.tensors import check_metadata, is_readable
from ..errors import UnsupportedError

__all__ = ["chunk_gated_delta_rule"]

_NAME, _BY_TOKENS = "chunk_gated_delta_rule", "flashinfer.delta_rule.chunk_gated_delta_rule"


def _error(argument: str, got: object, wanted: str) -> ValueError:
    return value_error(_NAME, argument, got, wanted)


def _rows(state_indices: torch.Tensor, sequences: int, *pools: torch.Tensor) -> torch.Tensor:
    """Return rows of pools as int64.

    Raises:
        ValueError: another number of rows, or on the CPU a row that is repeated or outside a pool. On CUDA the
            values are not read.
    """
    rows = indices(_NAME, "state_indices", state_indices)
    assert rows is not None
    check_metadata(_NAME, "state_indices", rows, (sequences,), pools[0].device, torch.int32, torch.int64)
    if is_readable(rows):
        least = min(pool.shape[0] for pool in pools)
        if bool(((rows < 0) | (rows >= least)).any()):
            raise _error("state_indices", "a row outside the pool", f"rows from 0 to {least - 1}")
        if rows.unique().numel() != sequences:
            raise _error("state_indices", "a row twice", "different rows")
    return rows.long()


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
        initial_state: ``[N, H, V, K]``, float32, float16 or bfloat16; ``None``: zeros. A pool ``[slots, H, V, K]``
            with ``state_indices``.
        output_final_state: also return the final states.
        cu_seqlens: ``[N + 1]`` integers, required.
        use_qk_l2norm_in_kernel: as in :func:`flashinfer.delta_rule.chunk_gated_delta_rule`.
        output: ``[T, H, V]`` of v's dtype, written and returned.
        output_state: ``[N, H, V, K]``, float32, float16 or bfloat16, written and returned. ``None``:
            allocated in initial_state's dtype, or in float32 without one. A pool with ``state_indices``, which may
            be the same tensor. Only the named rows are written.
        state_checkpoints: ``[C, H, V, K]``, contiguous, of initial_state's dtype, or float32 without one. It receives
            the state after every ``checkpoint_every_n_tokens`` tokens of each sequence, without a remainder at the
            end. On CUDA such a call runs the recurrent kernel, not the chunk kernels.
        checkpoint_cu_starts: ``[N + 1]`` integers: sequence n writes rows from its element on. Rows outside
            ``state_checkpoints`` are not written.
        checkpoint_every_n_tokens: a multiple of 64; 0: no checkpoints.
        use_cp: ``"auto"`` or ``False``. ``True`` requests a split of sequences, which has no kernel.
        state_indices: ``[N]`` different integers, the rows of the pools that the sequences read and write. The pools
            may have any strides. The call gathers the rows before the kernel and scatters them after it. On the CPU
            an invalid row is an error; on CUDA it fails an assertion of the device.
        backend: ``"auto"`` or ``"flashinfer"``, which are the same.
        _cp_chunk_len, max_seqlen: unused hints.

    Returns:
        The output, or ``(output, state)``.

    Raises:
        ValueError: invalid shapes or values.
        TypeError: invalid dtypes.
        UnsupportedError: ``use_cp=True``.
        GradientError: checkpoints, and a tensor that requires a gradient.
    """
    check_rank(_NAME, 3, f", or four in {_BY_TOKENS}", q=q, k=k, v=v)
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None:
            check_rank(_NAME, 2, f", or three in {_BY_TOKENS}", **{name: gate})
            check_floats(_NAME, name, gate)
    check_option(_NAME, "use_cp", use_cp, ("auto", True, False))
    if use_cp is True:
        raise UnsupportedError(f"{_NAME}: use_cp: has no kernel here; leave it at its default")
    check_option(_NAME, "backend", backend, ("auto", "flashinfer"))
    if cu_seqlens is None:
        raise _error("cu_seqlens", None, "offsets of the sequences")
    count = max(q.shape[1], v.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0 or count % tensor.shape[1]:
            raise _error(name, f"{tensor.shape[1]} heads", f"a divisor of {count}")
    if g is not None and is_readable(g) and bool(((g < 0) | (g > 1)).any()):
        raise _error("g", "numbers outside [0, 1]", f"decays themselves; {_BY_TOKENS} takes their logarithms")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    halves = () if wide == torch.float64 else (torch.float16, torch.bfloat16)
    sequences, shape = cu_seqlens.shape[0] - 1, (count, v.shape[2], q.shape[2])
    if output is not None:
        check_metadata(_NAME, "output", output, (v.shape[0], count, v.shape[2]), v.device, v.dtype)
    pools = {
        name: one for name, one in (("initial_state", initial_state), ("output_state", output_state)) if one is not None
    }
    for name, pool in pools.items():
        check_rank(_NAME, 4, "", **{name: pool})
        states = sequences if state_indices is None else pool.shape[0]
        check_metadata(_NAME, name, pool, (states, *shape), v.device, wide, *halves)
    checkpoints = checkpoints_of(
        _NAME, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, shape, sequences,
        wide if initial_state is None else initial_state.dtype, v.device,
    )  # fmt: skip
    rows = None
    if state_indices is not None:
        if output_state is None:
            raise _error("output_state", None, "a pool for state_indices")
        rows = _rows(state_indices, sequences, *pools.values())
        output_final_state = True
        if initial_state is not None:
            initial_state = initial_state.index_select(0, rows)
    log = v.new_zeros((1, v.shape[0], count), dtype=wide) if g is None else g.to(wide).log()[None]
    factor = v.new_ones((1, v.shape[0], count), dtype=wide) if beta is None else beta[None]
    grouped = k.shape == q.shape  # the kernels find the head of q and k that a value head reads
    o, state = run_sequences(
        _NAME, q[None] if grouped else _heads(q, count), k[None] if grouped else _heads(k, count), _heads(v, count),
        log, None, numbers(_NAME, "beta", factor, wide), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, True, True, checkpoints,
    )  # fmt: skip
    o = o[0] if output is None else output.copy_(o[0])
    if state is None:
        return o
    if output_state is None:
        return o, state if initial_state is None else state.to(initial_state.dtype)
    if rows is None:
        return o, output_state.copy_(state)
    return o, output_state.index_copy_(0, rows, state.to(output_state.dtype))
