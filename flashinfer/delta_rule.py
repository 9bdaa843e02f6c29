"""The delta rule: linear attention with corrected states (DeltaNet, Gated DeltaNet, Kimi Delta Attention).

For a sequence and a value head, with a state ``S`` of ``[K, V]``, decays ``a = exp(g)`` and ``scale`` s::

    S = a S;  r = v - S^T k;  u = beta r;  S = S + k u^T;  o = s S^T q

Names, shapes and defaults are those of flash-linear-attention: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``,
**g is the natural logarithm of the decay**, and **states are** ``[N, HV, K, V]``. With ``state_v_first=True``
states are ``[N, HV, V, K]``, as in FlashInfer's functions. If K = V, nothing can tell the two apart.

Each function is one operator with a gradient, and one node of a ``torch.compile`` graph for all shapes and
scales. It saves its inputs, computes in float32 (float64 for float64) for any length, and sums in fixed
orders. On CUDA the ``chunk_*`` functions multiply half types on tensor cores, with states and sums in
float32. Operands are rounded to q's dtype, and an output's error is two or three of its roundings. Some calls
compute like the recurrent functions: more than 256 keys in a head, more than 128 keys and a decay for each
row of the state, rows that do not begin at multiples of 16 bytes, gradients of both kinds of decay, and GPUs
whose CTAs have less than 163 KiB of shared memory.
"""

from __future__ import annotations

import torch

from ._delta_rule.arguments import (
    PACKED,
    channel_gate,
    check_bound,
    check_chunk,
    check_floats,
    check_logarithms,
    check_rank,
    check_table,
    check_tokens,
    checked_scale,
    dense,
    gate,
    indices,
    numbers,
    sigmoid_of,
)
from ._delta_rule.operators import delta_rule_step as delta_rule_step_operator
from ._delta_rule.sequences import run_sequences
from ._ops.arguments import check_none
from ._ops.errors import value_error
from ._ops.scalars import scalar
from ._ops.tensors import check_metadata
from .delta_rule_backward import state_dtype
from .jit.modules.delta_rule import gen_delta_rule_module

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "delta_rule_step",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "gen_delta_rule_module",
]


def fused_recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute DeltaNet's recurrence token by token, in float32.

    Args:
        q, k: ``[B, T, H, K]`` (float32, float16, bfloat16; on the CPU float64), K at most 256, any strides
            with a contiguous last dimension; others are copied.
        v: ``[B, T, HV, V]``, HV a multiple of H: value head h reads head ``h // (HV // H)``. If the dtypes of
            q, k and v differ, all are promoted as torch does, and the output has v's.
        beta: ``[B, T, HV]``, or ``[B, T, HV, V]``, of any float dtype. ``None``: 1.
        scale: factor of q; ``None``: ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, any float dtype; ``None``: zeros. N is B, or the number of
            sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x ** 2) + 1e-6)`` first.
        cu_seqlens: ``[N + 1]`` integers: offsets of N sequences that follow each other in a batch of 1. On
            CUDA its values are never read on the host.
        state_v_first: states are ``[N, HV, V, K]``.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` of v's dtype, and float32 (float64 for float64) or ``None``.

    Raises:
        ValueError: invalid shapes, devices or offsets.
        TypeError: invalid dtypes.
    """
    name = "fused_recurrent_delta_rule"
    check_tokens(name, q, k, v)
    return run_sequences(
        name, q, k, v, None, None, numbers(name, "beta", beta, state_dtype(q, k, v)), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, False,
    )  # fmt: skip


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute DeltaNet in chunks of tokens.

    Arguments, results and errors are those of :func:`fused_recurrent_delta_rule`.

    Args:
        beta: ``[B, T, HV]``.
        cu_seqlens_cpu: accepted and unused.
        chunk_size: 16, 32 or 64, a hint.
    """
    name = "chunk_delta_rule"
    check_tokens(name, q, k, v)
    check_chunk(name, chunk_size)
    check_rank(name, 3, f", or two in {PACKED}", beta=beta)
    return run_sequences(
        name, q, k, v, None, None, numbers(name, "beta", beta, state_dtype(q, k, v)), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, True,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute Gated DeltaNet's recurrence token by token, in float32, with a gradient.

    Other arguments, results and errors are those of :func:`fused_recurrent_delta_rule`.

    Args:
        g: ``[B, T, HV]``, any float dtype, **natural logarithms** of decays, at most 0, ``-inf`` included.
        gk: ``[B, T, HV, K]``: one for each row of the state; g and gk together add.
        gv: has no kernel.
        beta: as there; logits with ``use_beta_sigmoid_in_kernel``.
        use_gate_in_kernel: the decay's logarithm is ``-exp(A_log) * softplus(g + dt_bias)``, with A_log and
            dt_bias ``[HV]``.
        allow_neg_eigval: twice the sigmoid of beta.
    """
    name = "fused_recurrent_gated_delta_rule"
    check_tokens(name, q, k, v)
    check_none(name, "gv", gv, "no kernel has a gate of columns")
    dtype = state_dtype(q, k, v)
    return run_sequences(
        name, q, k, v, gate(name, g, use_gate_in_kernel, A_log, dt_bias, dtype), numbers(name, "gk", gk, dtype),
        sigmoid_of(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, False,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute Gated DeltaNet in chunks of tokens.

    Arguments are those of :func:`fused_recurrent_gated_delta_rule`.

    Args:
        beta: ``[B, T, HV]``.
        cu_seqlens_cpu, chunk_indices: accepted and unused.
        chunk_size: 16, 32 or 64, a hint.

    flashinfer.chunk_gated_delta_rule is another function: packed tensors, decays themselves, states
    ``[N, HV, V, K]``.
    """
    name = "chunk_gated_delta_rule"
    check_tokens(name, q, k, v)
    check_chunk(name, chunk_size)
    check_rank(name, 3, f", or two in {PACKED}", beta=beta)
    dtype = state_dtype(q, k, v)
    return run_sequences(
        name, q, k, v, gate(name, g, use_gate_in_kernel, A_log, dt_bias, dtype), None,
        sigmoid_of(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, True,
    )  # fmt: skip


def fused_recurrent_kda(
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
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute Kimi Delta Attention token by token, in float32, with a gradient.

    Each row of the state has its own decay.

    Other arguments, results and errors are those of :func:`fused_recurrent_gated_delta_rule`.

    Args:
        g: ``[B, T, HV, K]``, any float dtype, **natural logarithms** of decays, at most 0.
        beta: ``[B, T, HV]``.
        use_gate_in_kernel: the decay's logarithm is ``-exp(A_log) * softplus(g + dt_bias)``, with A_log
            ``[HV]`` and dt_bias ``[HV, K]``, flat or not.
        lower_bound: the logarithm with ``use_gate_in_kernel`` is
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
    """
    name = "fused_recurrent_kda"
    check_tokens(name, q, k, v)
    dtype = state_dtype(q, k, v)
    return run_sequences(
        name, q, k, v, None, channel_gate(name, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, dtype),
        sigmoid_of(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, False,
    )  # fmt: skip


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute Kimi Delta Attention in chunks of tokens.

    Arguments and results are :func:`fused_recurrent_kda`'s.

    Args:
        safe_gate: promises logarithms of at least ``lower_bound``, which is -5 or more then: a hint.
        cu_seqlens_cpu: accepted and unused.
        chunk_size: 32 or 64, a hint.
    """
    name = "chunk_kda"
    check_tokens(name, q, k, v)
    check_chunk(name, chunk_size, (32, 64))
    if safe_gate and (lower_bound is None or lower_bound < -5):
        raise value_error(name, "lower_bound", lower_bound, "-5 or more with safe_gate")
    dtype = state_dtype(q, k, v)
    return run_sequences(
        name, q, k, v, None, channel_gate(name, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, dtype),
        sigmoid_of(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, True,
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    gk: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    state_indices: torch.Tensor | None = None,
    output_indices: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    update_state: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take one token of each sequence, or a few, and update a pool of states in place (decoding).

    Args:
        q, k, v, scale, use_qk_l2norm_in_kernel: as in :func:`fused_recurrent_delta_rule`, with a small T.
        state: ``[slots, HV, K, V]`` (``state_v_first``: ``[slots, HV, V, K]``), float32, float16 or bfloat16,
            contiguous in each slot; slots may have gaps. Computed in float32 and rounded once, when it is stored.
        g, beta: ``[B, T, HV]``; beta ``[B, T, HV, V]`` too. g is the **natural logarithm** of the decay, at
            most 0.
        gk: ``[B, T, HV, K]``, one logarithm for each row of the state; g and gk together add.
        A_log: ``[HV]``: g is raw, and the decay's logarithm is ``-exp(A_log) * softplus(g + dt_bias)``,
            computed in the kernel. Without g, gk is raw: one gate for each channel.
        dt_bias: ``[HV]``; of a raw gk ``[HV, K]``, flat or not.
        beta_is_logit: beta is its sigmoid, twice that with ``allow_neg_eigval``.
        lower_bound: below 0, with A_log: the logarithm is
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` instead.
        state_indices: ``[B]`` integers, the slot that a sequence reads and writes. A sequence whose slot is
            not in the pool, for example a negative one, has an o of 0 and writes nothing. ``None``: slot b.
        output_indices: ``[B]`` integers, the slot that is written instead; an invalid one is not written.
        snapshots: ``[B, at least T, HV, ...]`` of state's dtype, receives the state after each token.
        update_state: ``False`` leaves the pool unchanged.
        out: ``[B, T, HV, V]`` of q's dtype.

    Returns:
        ``[B, T, HV, V]``.

    Raises:
        ValueError: invalid shapes or devices; on the CPU also a g or gk above 0 that is not raw. On CUDA
            those values are not read, because reading would wait for the device and fail in a capture.
        TypeError: invalid dtypes; a state of 8 bits, which has no scale.
        GradientError: a tensor requires a gradient.
    """
    name = "delta_rule_step"
    check_tokens(name, q, k, v)
    number, dtype = checked_scale(name, q, scale), state_dtype(q)
    if allow_neg_eigval and not beta_is_logit:
        raise value_error(name, "allow_neg_eigval", True, "beta_is_logit with it")

    check_bound(name, lower_bound)
    check_floats(name, "state", state)
    if out is not None:
        check_metadata(name, "out", out, v.shape, v.device, v.dtype)
    raw_gk = A_log is not None and g is None and gk is not None
    bias = numbers(name, "dt_bias", dt_bias, torch.float32)
    if bias is not None and raw_gk:
        rows = v.shape[2], q.shape[3]
        check_table(name, "dt_bias", bias, rows)
        bias = bias.reshape(rows)
    gates = numbers(name, "g", g, dtype), numbers(name, "gk", gk, dtype)
    if A_log is None:
        check_logarithms(name, "g", gates[0])
    if not raw_gk:
        check_logarithms(name, "gk", gates[1])
    result = delta_rule_step_operator(
        dense(q), dense(k), dense(v), state, *gates, numbers(name, "beta", beta, dtype),
        numbers(name, "A_log", A_log, torch.float32), bias, indices(name, "state_indices", state_indices),
        indices(name, "output_indices", output_indices), snapshots, *scalar(number, q.device), lower_bound or 0.0,
        (2 if allow_neg_eigval else 1) if beta_is_logit else 0, use_qk_l2norm_in_kernel, state_v_first, update_state,
    )  # fmt: skip
    return result if out is None else out.copy_(result)
