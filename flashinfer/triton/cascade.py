"""Merging of attention states: ``merge_state``, ``merge_state_in_place`` and ``merge_states`` are :mod:`flashinfer.cascade`'s."""

from __future__ import annotations

import math

import torch

from ..cascade import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the states of each segment of ``v`` and ``s``: ``merge_states`` for numbers of states that differ.

    Args:
        v: partial outputs, ``[states, num_heads, head_dim]``.
        s: log2 of their sums of weights, ``[states, num_heads]`` float32.
        indptr: ``[segments + 1]`` integers: segment ``i`` is ``v[indptr[i]:indptr[i + 1]]``. The last is ``states``.

    Returns:
        ``(v_merged, s_merged)``, ``[segments, num_heads, head_dim]`` and ``[segments, num_heads]``; 0 and ``-inf`` where
        a segment is empty.

    Raises:
        ValueError: shapes that do not fit each other.

    Source: Ye et al.: Cascade Inference, 2024.
    """
    if v.ndim != 3 or s.shape != v.shape[:2]:
        raise ValueError(f"variable_length_merge_states: s: got shape {list(s.shape)}, wanted {list(v.shape[:2])}")
    if indptr.ndim != 1 or indptr.numel() < 1:
        raise ValueError(f"variable_length_merge_states: indptr: got shape {list(indptr.shape)}, wanted [segments + 1]")
    segments, lengths = indptr.numel() - 1, indptr.diff().to(torch.int64)
    numbers = torch.arange(segments, device=v.device)
    segment = numbers.repeat_interleave(lengths.to(v.device), output_size=v.shape[0])
    rows = segment[:, None].expand_as(s)
    highest = s.new_full((segments, s.shape[1]), -math.inf).scatter_reduce(0, rows, s, "amax")
    reference = torch.where(highest.isinf(), 0.0, highest)
    weights = torch.exp2(s - reference[segment])
    total = torch.zeros_like(highest).index_add(0, segment, weights)
    sums = v.new_zeros((segments, *v.shape[1:]), dtype=torch.float32)
    sums = sums.index_add(0, segment, torch.where(weights[..., None] > 0, v.float(), 0.0) * weights[..., None])
    merged = torch.where(total[..., None] > 0, sums / total[..., None], 0.0)
    return merged.to(v.dtype), reference + total.log2()
