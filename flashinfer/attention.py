"""Attention of batches that mix prefill and decode in one plan."""

from __future__ import annotations

import torch

from ._attention.arguments import CAUSAL, NON_CAUSAL, PagedCache, logits_of
from ._attention.lists import Shape
from ._attention.masks import NO_MASKS
from ._attention.scales import Scale
from ._attention.sink_wrapper import BatchAttentionWithAttentionSinkWrapper
from ._attention.tables import Batch, Tables, check_indices, on_host
from ._attention.wrapper import BatchWrapper
from ._ops.errors import value_error
from ._ops.indices import check_each, check_offsets, index_tables
from ._ops.numbers import positive
from ._ops.tensors import check_count

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]

FLOAT_WORKSPACE = 128 << 20  # bytes


class BatchAttention(BatchWrapper):
    """Attention of requests with any numbers of queries over a paged cache, decodes and prefills in one batch.

    One plan balances all work. Call ``plan()`` once for each set of lengths, then ``run()`` for each layer.
    The first plan allocates the workspaces on the device of its ``kv_indices``.

    Args:
        kv_layout: layout of caches, ``"NHD"`` or ``"HND"``.

    Raises:
        ValueError: another layout.
    """

    _family, _cache_argument = "prefill", "kv_cache"

    def __init__(self, kv_layout: str = "NHD") -> None:
        super().__init__(torch.empty(0, dtype=torch.uint8, device="cpu"), kv_layout, False)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
        *,
        logits_soft_cap: float | None = None,
    ) -> None:
        """Balance the work of a batch. Call it whenever lengths change.

        Args:
            qo_indptr: ``[batch_size + 1]`` integers, the first query of each request in ``q``.
            kv_indptr: ``[batch_size + 1]`` integers, the first page of each request in ``kv_indices``. This
                table and ``qo_indptr`` may be slices of longer ones.
            kv_indices: integers, the pages. Their device becomes the wrapper's device.
            kv_len_arr: ``[batch_size]`` integers, keys of each request, at most the slots of its pages.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size: as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal, sm_scale, q_data_type, kv_data_type, logits_soft_cap: likewise.
            use_profiler: run kernels that write events to each run's ``profiler_buffer``: docs/profiling.md.

        Raises:
            ValueError: tables, sizes or modes that do not fit.
            TypeError: dtypes that do not fit.
        """
        op = f"{self._name}.plan"
        given = index_tables(op, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        shape = Shape.of(op, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type)
        logits = logits_of(op, head_dim_qk, "NONE", -1, logits_soft_cap, sm_scale, None, None)
        batch = self._batch(op, page_size, **given)
        self._events.enabled = bool(use_profiler)
        self._plan(batch, shape, logits, CAUSAL if causal else NON_CAUSAL, NO_MASKS, page_size)

    def _batch(
        self,
        op: str,
        page_size: int,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> Batch:
        positive(op, "page_size", page_size)
        queries, pages, lens = on_host(qo_indptr, kv_indptr, kv_len_arr)
        check_offsets(op, "qo_indptr", queries)
        batch_size = queries.numel() - 1
        first, used = check_offsets(op, "kv_indptr", pages, batch_size)
        check_count(op, "kv_len_arr", lens, batch_size)
        check_each(op, "kv_len_arr", lens, 0, pages.diff().to(torch.int64) * page_size, ", the slots of its pages")
        num_pages = check_indices(op, "kv_indices", kv_indices, "kv_indptr", first, used)
        self._move_to(kv_indices.device)
        tables = Tables(op, self.device, non_blocking=True)
        indptr = tables.to_device("kv_indptr", None, kv_indptr)
        return Batch(
            int(queries[-1]),
            queries,
            lens,
            num_pages,
            indptr,
            tables.to_device("kv_indices", None, kv_indices[:used]),
            first_query=int(queries[0]),
        )

    def _move_to(self, device: torch.device) -> None:
        """Allocate the workspaces in the first plan, or in a plan for another device."""
        if device == self.device and self._scheduler.float_workspace.numel():
            return
        self._scheduler.reset(torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device=device), None)
        self.device = device
        self._forget_plan()

    def run(
        self,
        q: torch.Tensor,
        kv_cache: PagedCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        profiler_buffer: torch.Tensor | None = None,
        *,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``.
            kv_cache: as for :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]`` to write the output to. Allocated by default.
            lse: ``[qo_indptr[-1], num_qo_heads]`` float32, contiguous, to write the lse to. Allocated by
                default.
            profiler_buffer: ``[words]`` uint64 or int64 for events. Required after a plan with
                ``use_profiler``, ``None`` after others. Events that do not fit are counted and dropped.
            k_scale, v_scale: factors of the keys and of the output, as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
            logits_soft_cap: the plan's cap, repeated. ``None`` and 0 leave it as it is.

        Returns:
            ``(out, lse)``. The lse is in base 2.

        Raises:
            ValueError: no plan, or shapes, strides, devices or a cap that do not fit it.
            TypeError: dtypes that do not fit it.
        """
        op = f"{self._name}.run"
        planned = self._planned_or_fail("run")
        if logits_soft_cap and logits_soft_cap != planned.logits.logits_soft_cap:
            raise value_error(op, "logits_soft_cap", logits_soft_cap, f"the plan's, {planned.logits.logits_soft_cap}")
        self._events.set_buffer(op, profiler_buffer, planned.operators, self.device)
        return self._run_paged(q, kv_cache, (), (None, k_scale, v_scale), out, lse, True)  # type: ignore[return-value]
