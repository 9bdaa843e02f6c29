"""Merge of partial states in segments of any lengths."""

from __future__ import annotations

import math

import torch

from .._ops.dtypes import WIDE_FLOATS
from .._ops.errors import check_one_device
from .._ops.indices import check_offsets, index_table
from .._ops.numbers import check_option, check_range
from .._ops.shapes import check_tensors
from .._ops.tensors import is_readable
from .arguments import no_gradient


def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the states of each segment: :func:`flashinfer.merge_states` for different numbers of states.

    Args:
        v: ``[states, num_heads, head_dim]``, partial outputs: float32, float16 or bfloat16.
        s: ``[states, num_heads]``, lse in base 2, of any floating-point dtype. Sums are in float32.
        indptr: ``[segments + 1]`` integers. Segment ``i`` is ``v[indptr[i]:indptr[i + 1]]``. The last is
            ``states``.

    Returns:
        ``(v_merged, s_merged)``: ``[segments, num_heads, head_dim]`` of ``v``'s dtype and ``[segments,
        num_heads]`` float32. An empty segment has 0 and ``-inf``.

    Raises:
        GradientError: a state that requires a gradient.
        ValueError: shapes or devices that do not fit each other.
        TypeError: dtypes that do not fit.

    Source: Ye et al.: Cascade Inference, 2024.
    """
    op = "variable_length_merge_states"
    no_gradient(op, (v, s))
    states, _, _ = check_tensors(
        op, v=(v, "states heads head_dim", WIDE_FLOATS), s=(s, "states heads", WIDE_FLOATS)
    )  # fmt: skip
    check_one_device(op, ("v", "indptr"), (v, indptr))
    indptr = index_table(op, "indptr", indptr)
    s = s.float()
    check_range(op, "indptr", indptr.numel(), 1, unit="elements")
    if is_readable(indptr):
        first, end = check_offsets(op, "indptr", indptr)
        check_option(op, "indptr", (first, end), ((0, states),), ", all states of v")
    segments = indptr.numel() - 1
    # Number the segment of each state by counting the segments that have begun. repeat_interleave would read lengths
    # on the host, or assert on the device.
    begins = indptr[1:-1].clamp(0, states).long()
    counts = torch.zeros(states + 1, dtype=torch.int64, device=v.device)
    segment = counts.index_add(0, begins, torch.ones_like(begins)).cumsum(0)[:states]
    rows = segment[:, None].expand_as(s)
    highest = s.new_full((segments, s.shape[1]), -math.inf).scatter_reduce(0, rows, s, "amax")
    reference = torch.where(highest.isinf(), 0.0, highest)
    weights = torch.exp2(s - reference[segment])
    total = torch.zeros_like(highest).index_add(0, segment, weights)
    sums = v.new_zeros((segments, *v.shape[1:]), dtype=torch.float32)
    sums = sums.index_add(0, segment, torch.where(weights[..., None] > 0, v.float(), 0.0) * weights[..., None])
    merged = torch.where(total[..., None] > 0, sums / total[..., None], 0.0)
    return merged.to(v.dtype), reference + total.log2()
