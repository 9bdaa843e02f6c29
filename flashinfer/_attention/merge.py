"""Merge of partial states: the operators, and the functions that call them.

``s = log2(2 ** s_a + 2 ** s_b)``, ``v = v_a * 2 ** (s_a - s) + v_b * 2 ** (s_b - s)``; see
:mod:`flashinfer.cascade`.
"""

from __future__ import annotations

from typing import Any

import torch

from .._ops.declare import define
from .._ops.dtypes import WIDE_FLOATS
from .._ops.route import without_gradient
from ..jit.modules.cascade import gen_cascade_module


def _like_a(v_a: torch.Tensor, s_a: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


def _without_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seq_len, _, num_heads, head_dim = v.shape
    return v.new_empty((seq_len, num_heads, head_dim)), s.new_empty((seq_len, num_heads))


_merge_state = define(
    "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
    gen_cascade_module,
    _like_a,
    fallback=without_gradient("merge_state", "v_a", "s_a", "v_b", "s_b"),
)
_merge_state_in_place = define(
    "merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask) -> ()",
    gen_cascade_module,
    fallback=without_gradient("merge_state_in_place", "v", "s", "v_other", "s_other"),
)
_merge_states = define(
    "merge_states(Tensor v, Tensor s) -> (Tensor, Tensor)",
    gen_cascade_module,
    _without_states,
    fallback=without_gradient("merge_states", "v", "s"),
)


def as_lse(s: torch.Tensor) -> torch.Tensor:
    """Return the lse in float32, as the kernels read it.

    The operator refuses dtypes that are not floating-point.
    """
    if isinstance(s, torch.Tensor) and s.dtype != torch.float32 and s.dtype in WIDE_FLOATS:
        return s.float()
    return s


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states.

    Args:
        v_a, v_b: ``[seq_len, num_heads, head_dim]``, float32, float16 or bfloat16, both of one dtype. The
            last dimension is contiguous; other strides are free.
        s_a, s_b: ``[seq_len, num_heads]``, lse in base 2, any strides. float32; float16, bfloat16 and float64
            are converted.

    Returns:
        ``(v, s)`` with the shapes of ``v_a`` and ``s_a``. ``v`` has the dtype of ``v_a``, ``s`` is float32.
        The merge of two empty states is 0 and -inf.

    Raises:
        ValueError: shapes, strides or devices that do not fit.
        TypeError: dtypes that do not fit.

    Weights and sums are in float32.
    """
    return _merge_state(v_a, as_lse(s_a), v_b, as_lse(s_b))  # type: ignore[no-any-return]


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another state into ``(v, s)``, and overwrite them.

    Args:
        v, v_other, s, s_other: as for :func:`merge_state`. The result is rounded to the dtype of ``s``.
        mask: ``[seq_len]`` bool or uint8. Rows with 0 stay unchanged. By default all rows are merged.

    Raises:
        ValueError: shapes, strides or devices that do not fit, or arguments that overlap.
        TypeError: dtypes that do not fit.
    """
    lse = as_lse(s)
    if lse is s:
        _merge_state_in_place(v, s, v_other, as_lse(s_other), mask)
        return
    for size, stride in zip(s.shape, s.stride(), strict=True):
        if size > 1 and stride == 0:  # the copy back would fail after v was written
            raise ValueError("merge_state_in_place: s: has elements that share memory (stride 0)")
    _merge_state_in_place(v, lse, v_other, as_lse(s_other), mask)
    s.copy_(lse)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial states along the dimension ``num_states``.

    Args:
        v: ``[seq_len, num_states, num_heads, head_dim]``, float32, float16 or bfloat16. The last dimension is
            contiguous; other strides are free.
        s: ``[seq_len, num_states, num_heads]``, lse in base 2, any strides, dtypes as for
            :func:`merge_state`.

    Returns:
        ``(v, s)``: ``[seq_len, num_heads, head_dim]`` of ``v``'s dtype and ``[seq_len, num_heads]`` float32.
        If all states are empty, or there are none, the result is 0 and -inf.

    Raises:
        ValueError, TypeError: as :func:`merge_state`.
    """
    return _merge_states(v, as_lse(s))  # type: ignore[no-any-return]
