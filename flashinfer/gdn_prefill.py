"""Gated DeltaNet's prefill under FlashInfer's name and in its conventions.

They differ from those of :mod:`flashinfer.delta_rule`, which has the same kernels: tensors are packed, **g is the decay
itself**, in (0, 1], and **states are** ``[N, H, V, K]``. Where K = V nothing can tell such states from ``[N, H, K, V]``.
"""

from __future__ import annotations

import torch

from ._delta_rule.arguments import check_rank
from ._ops.tensors import can_be_looked_at, check_form
from .delta_rule import chunk_gated_delta_rule as _by_tokens

__all__ = ["chunk_gated_delta_rule"]

_NAME = "chunk_gated_delta_rule"


def _wanted(argument: str, got: object, wanted: str) -> ValueError:
    return ValueError(f"{_NAME}: {argument}: got {got}, wanted {wanted}")


def _heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """``[T, h, n]`` as ``[1, T, count, n]``: each head as often as it is read."""
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
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over sequences that lie behind each other.

    Args:
        q: ``[T, Hq, K]`` (float32, float16, bfloat16).
        k: ``[T, Hk, K]``, same dtype; Hq and Hk divide the number of state heads.
        v: ``[T, Hv, V]``, same dtype. States and the result have ``max(Hq, Hv)`` heads.
        g: ``[T, H]``, decays in (0, 1], of any float dtype; ``None``: 1. On the CPU others are an error.
        beta: ``[T, H]``, of any float dtype; ``None``: 1.
        scale: ``None``: ``K ** -0.5``.
        initial_state: ``[N, H, V, K]``, float32, float16 or bfloat16; ``None``: zeros.
        output_final_state: whether to return the last states; ``output_state`` is required then.
        cu_seqlens: ``[N + 1]``, int32 or int64, required.
        use_qk_l2norm_in_kernel: as in :func:`flashinfer.delta_rule.chunk_gated_delta_rule`.
        output: ``[T, H, V]`` of v's dtype, is written and returned.
        output_state: ``[N, H, V, K]``, float32, float16 or bfloat16, is written and returned.
        backend: ``"auto"`` or ``"flashinfer"``: there is one.
        max_seqlen: a hint that is not needed.

    Returns:
        The output, or ``(output, state)``.

    Raises:
        ValueError: shapes or values that do not fit.
        TypeError: dtypes that do not fit.
    """
    check_rank(_NAME, 3, ", or four in flashinfer.delta_rule.chunk_gated_delta_rule", q=q, k=k, v=v)
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None:
            check_rank(_NAME, 2, "", **{name: gate})
    if backend not in ("auto", "flashinfer"):
        raise _wanted("backend", repr(backend), "'auto' or 'flashinfer'")
    if cu_seqlens is None:
        raise _wanted("cu_seqlens", "None", "offsets of the sequences")
    if output_final_state and output_state is None:
        raise _wanted("output_state", "None", "a tensor beside output_final_state=True")
    count = max(q.shape[1], v.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0 or count % tensor.shape[1]:
            raise _wanted(name, f"{tensor.shape[1]} heads", f"a divisor of {count}")
    if g is not None and can_be_looked_at(g) and bool(((g < 0) | (g > 1)).any()):
        raise _wanted("g", "numbers outside [0, 1]", "decays themselves, not their logarithms")
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
        check_form(_NAME, "output", output, o.shape, o.device, o.dtype)
    if state is not None and output_state is not None:
        halves = () if state.dtype == torch.float64 else (torch.float16, torch.bfloat16)
        check_form(_NAME, "output_state", output_state, state.shape, state.device, state.dtype, *halves)
        output_state.copy_(state)
    o = o if output is None else output.copy_(o)
    return o if state is None or output_state is None else (o, output_state)
