"""Merge of attention states: attention over all keys from attention over parts of them.

A state is ``(v, s)``: the output of attention over some keys, and the lse. The lse is the base-2 logarithm of
the sum of ``exp(logit)`` over these keys. States of disjoint sets of keys merge exactly, in any order:
``s = log2(2 ** s_a + 2 ** s_b)``, ``v = v_a * 2 ** (s_a - s) + v_b * 2 ** (s_b - s)``.
A state over no keys has ``s = -inf``, and its ``v`` is ignored.

Source: Ye et al.: Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ._attention.arguments import LAYOUTS, PagedCache, caches_of
from ._attention.merge import merge_state, merge_state_in_place, merge_states
from ._attention.plan import NoCopies
from ._attention.segments import variable_length_merge_states
from ._ops.arguments import check_equal, check_items, check_planned
from ._ops.errors import call_as
from ._ops.indices import index_tables
from ._ops.numbers import check_option, check_range, whole
from ._ops.tensors import check_dims, check_tensor
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .jit.modules.cascade import gen_cascade_module
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "gen_cascade_module",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]


# Errors of inner wrappers use these names: an argument there -> its name here.
_OF_LEVEL = {
    **{name: f"{name}_arr" for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices")},
    **{f"{name}_buf": f"{name}_buf_arr" for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices")},
    "paged_kv_last_page_len": "paged_kv_last_page_len",
    "paged_kv_last_page_len_buf": "paged_kv_last_page_len_buf_arr",
    "int_workspace_buffer": "int_workspace_buffers",
}
_OF_UNIQUE = {
    **{name: f"unique_kv_{name}" for name in ("indptr", "indices", "last_page_len")},
    **dict.fromkeys(("q_data_type", "kv_data_type"), "data_type"),
}
_OF_PARTS = {
    "k": "k_shared", "v": "v_shared", "v_other": "v_shared", "paged_kv_cache": "unique_kv_cache", "q_data_type": "q",
    "kv_data_type": "unique_kv_cache", "head_dim_qk": "head_dim",
}  # fmt: skip


def _at_level(level: int) -> dict[str, str]:
    """Return the names of a level's tables and buffers."""
    return {name: f"{array}[{level}]" for name, array in _OF_LEVEL.items()} | {"head_dim_qk": "head_dim"}


def _with_prefix(
    v: torch.Tensor, s: torch.Tensor, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, kv_layout: str,
    sm_scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return the output ``v`` after merging attention over the shared keys into it."""
    prefix = call_as(
        _OF_PARTS, single_prefill_with_kv_cache, q, k_shared, v_shared, kv_layout=kv_layout, sm_scale=sm_scale,
        return_lse=True,
    )  # fmt: skip
    call_as(_OF_PARTS, merge_state_in_place, v, s, *prefix)
    return v


class MultiLevelCascadeAttentionWrapper(NoCopies):
    """Attention of requests with shared prefixes. Each shared part is read once for all of its requests.

    Level 0 holds the keys that most requests share, the last level the keys of single requests. Every level
    is attention of a batch over the same paged cache. The levels' states are merged. Call ``plan()`` once for
    each set of lengths, then ``run()`` for each layer.

    Args:
        num_levels: at least 1.
        float_workspace_buffer: as for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`. All levels
            share it.
        kv_layout: layout of caches, ``"NHD"`` or ``"HND"``.
        use_cuda_graph: copy tables to the buffers below, one of each per level. A CUDA graph may then capture
            ``run()``.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr:
            for every level the buffers of :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, int32.

    Raises:
        ValueError, TypeError: a number of levels, buffers or a layout that do not fit.

    Source: Ye et al.: Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding, 2024.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._name = type(self).__name__
        whole(self._name, "num_levels", num_levels, 1)
        buffers: dict[str, Any] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        self._num_levels = num_levels
        self._use_cuda_graph = bool(use_cuda_graph)
        self._rows: int | None = None  # queries of the plan
        if self._use_cuda_graph:
            for name, array in buffers.items():
                check_items(self._name, name, array, "one for every level", num_levels)
        self._levels = [
            call_as(
                _at_level(level),
                BatchPrefillWithPagedKVCacheWrapper,
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                *(array[level] for array in buffers.values() if self._use_cuda_graph),
            )
            for level in range(num_levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if tables are copied to the caller's buffers, for CUDA graphs."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replace the workspaces. Call ``plan()`` before the next run.

        Args:
            float_workspace_buffer: as for the constructor.
            int_workspace_buffers: one buffer for each level's plan.

        Raises:
            ValueError, TypeError: another number of buffers than levels, another device, or buffers that do
                not fit.
        """
        op = f"{self._name}.reset_workspace_buffer"
        check_items(op, "int_workspace_buffers", int_workspace_buffers, "one for every level", self._num_levels)
        self._rows = None
        for number, (level, buffer) in enumerate(zip(self._levels, int_workspace_buffers, strict=True)):
            call_as(_at_level(number), level.reset_workspace_buffer, float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
    ) -> None:
        """Balance the work of every level. Call it whenever lengths change.

        Args:
            qo_indptr_arr: for every level ``[parts + 1]`` integers, the first query of each part in ``q``.
                The last element is the same at every level.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for every level the pages of
                its parts: ``[parts + 1]``, ``[indptr[-1]]`` and ``[parts]`` integers, as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal: mask of the last level. Queries see all keys of every other level.
            pos_encoding_mode, window_left: an error with several levels. Positions count from the start of a
                request, which a level does not know.
            num_qo_heads, num_kv_heads, head_dim, page_size: as for the prefill wrapper.
            sm_scale, logits_soft_cap, use_fp16_qk_reduction, rope_scale, rope_theta: as for the prefill
                wrapper.
            q_data_type: dtype of queries and of the cache.

        Raises:
            ValueError, TypeError: as the prefill wrapper's ``plan()``, or levels with different numbers of
                queries.
        """
        op = f"{self._name}.plan"
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, array in arrays.items():
            check_items(op, name, array, "one for every level", self._num_levels)
        if self._num_levels > 1:
            why = " with several levels: a level does not know the positions of its keys"
            check_option(op, "pos_encoding_mode", pos_encoding_mode, ("NONE",), why)
            check_range(op, "window_left", window_left, most=-1, why=why)
        self._rows = None  # until all levels are planned
        last = self._num_levels - 1
        for number, (level, *tables) in enumerate(zip(self._levels, *arrays.values(), strict=True)):
            call_as(
                _at_level(number), level.plan, *tables, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and number == last, pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale, window_left=window_left,
                logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
                q_data_type=q_data_type,
            )  # fmt: skip
        num_queries = [level._planned_or_fail("plan").batch.num_queries for level in self._levels]
        check_equal(op, "qo_indptr_arr", num_queries, "queries at the levels")
        self._rows = num_queries[0]

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """Compute attention of the planned requests.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim]``, of the planned dtype.
            paged_kv_cache: the cache of all levels, as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            ``[qo_indptr[-1], num_qo_heads, head_dim]`` of ``q``'s dtype.

        Raises:
            ValueError, TypeError: no plan, or tensors that do not fit it.
        """
        op = f"{self._name}.run"
        check_planned(op, self._rows)
        if self._num_levels == 1:
            return self._levels[0].run(q, paged_kv_cache)  # type: ignore[return-value]
        check_dims(op, "q", q, 3)
        v = q.new_empty((q.shape[0], self._num_levels, *q.shape[1:]))
        s = torch.empty((self._num_levels, *q.shape[:2]), dtype=torch.float32, device=q.device)
        for number, level in enumerate(self._levels):
            level.run(q, paged_kv_cache, out=v[:, number], lse=s[number])
        return merge_states(v, s.transpose(0, 1))[0]

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(NoCopies):
    """Decode of requests that all share their first keys.

    The shared keys and values are tensors. All other keys are in a paged cache. Deprecated in favour of
    :class:`MultiLevelCascadeAttentionWrapper`.

    Args:
        float_workspace_buffer, kv_layout: as for :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces, as :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper` does."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Plan the keys that are not shared.

        Args:
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len: ``[batch_size + 1]``,
                ``[unique_kv_indptr[-1]]`` and ``[batch_size]`` integers.
            num_qo_heads, num_kv_heads, head_dim, page_size: as for
                :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan`.
            data_type: dtype of queries and of the cache.

        Raises:
            ValueError, TypeError: as :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan`.
        """
        call_as(
            _OF_UNIQUE, self._unique.plan, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size, q_data_type=data_type, kv_data_type=data_type,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedCache,
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Compute attention of the planned batch.

        Args:
            q: ``[batch_size, num_qo_heads, head_dim]``, of the planned dtype.
            k_shared, v_shared: ``[shared_prefix_len, num_kv_heads, head_dim]`` (NHD) or
                ``[num_kv_heads, shared_prefix_len, head_dim]`` (HND).
            unique_kv_cache: as for :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.run`.
            allow_fp16_qk_reduction, rope_scale, rope_theta: accepted and ignored.
            sm_scale: factor of the logits, by default ``1 / sqrt(head_dim)``.

        Returns:
            ``[batch_size, num_qo_heads, head_dim]`` of ``q``'s dtype.

        Raises:
            ValueError, TypeError: no plan, or tensors that do not fit it.
        """
        check_planned(f"{type(self).__name__}.forward", self._unique._planned, "begin_forward()")
        # The paged part runs first, because it checks ``q`` against the plan.
        v, s = call_as(_OF_PARTS, self._unique.forward, q, unique_kv_cache, sm_scale=sm_scale, return_lse=True)
        return _with_prefix(v, s, q, k_shared, v_shared, self._kv_layout, sm_scale)

    def end_forward(self) -> None:
        """Do nothing. Callers of older interfaces use it."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(NoCopies):
    """Prefill of requests that all share their first keys.

    The shared keys and values are tensors. All other keys are in a paged cache. Deprecated in favour of
    :class:`MultiLevelCascadeAttentionWrapper`.

    Args:
        float_workspace_buffer, kv_layout: as for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._plan_for: Callable[..., None] | None = None  # plan() with the arguments of begin_forward()
        self._planned: tuple[Any, ...] = ()

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces, as :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper` does."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._plan_for = None

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Store the tables of the keys that are not shared.

        The first :meth:`forward` makes the plan, because it knows the dtypes.

        Args:
            qo_indptr, paged_kv_indptr: ``[batch_size + 1]`` integers.
            paged_kv_indices, paged_kv_last_page_len: ``[paged_kv_indptr[-1]]`` and ``[batch_size]`` integers.
            num_qo_heads, num_kv_heads, head_dim, page_size: as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError, TypeError: tables that are no vectors of integers.
        """
        tables = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        # Copies, because the caller's tables may change before the plan is made.
        tables = index_tables(f"{type(self).__name__}.begin_forward", **tables)
        queries, indptr, indices, last = (table.clone() for table in tables.values())
        self._plan_for = partial(
            self._unique.plan, queries, indptr, indices, last, num_qo_heads, num_kv_heads, head_dim, page_size
        )
        self._planned = ()

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Compute attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim]``.
            k_shared, v_shared, unique_kv_cache, sm_scale: as for
                :meth:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
            causal: mask of the keys that are not shared.
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted and ignored.

        Returns:
            ``[qo_indptr[-1], num_qo_heads, head_dim]`` of ``q``'s dtype.

        Raises:
            ValueError, TypeError: no plan, or tensors that do not fit it.
        """
        op = f"{type(self).__name__}.forward"
        plan = check_planned(op, self._plan_for, "begin_forward()")
        check_tensor(op, "q", q)
        k_cache, _ = call_as(_OF_PARTS, caches_of, op, unique_kv_cache, LAYOUTS[self._kv_layout])
        options = (bool(causal), sm_scale, q.dtype, k_cache.dtype)
        if options != self._planned:
            call_as(
                _OF_PARTS, plan, causal=options[0], sm_scale=sm_scale, q_data_type=q.dtype, kv_data_type=k_cache.dtype
            )
            self._planned = options
        v, s = call_as(_OF_PARTS, self._unique.run, q, unique_kv_cache, return_lse=True)
        return _with_prefix(v, s, q, k_shared, v_shared, self._kv_layout, sm_scale)

    def end_forward(self) -> None:
        """Do nothing. Callers of older interfaces use it."""
