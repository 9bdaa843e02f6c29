"""Wrapper of prefill over a paged cache."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from .._ops.indices import index_table
from .accepted import check_hints, check_run
from .arguments import CAUSAL, NON_CAUSAL, PagedCache
from .masks import mask_request
from .prefill_wrapper import BatchPrefill
from .request import PlanRequest, plan_settings
from .scales import Scale
from .signature import HostTables

_TABLES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Attention of a batch of requests over a paged cache.

    Call ``plan()`` once for each set of lengths, then ``run()`` for each layer.

    Args:
        float_workspace_buffer: contiguous memory of any dtype for partial states of split keys. Its device is
            the wrapper's device. 128 MiB suffice; ``plan()`` raises an error if it is too small.
        kv_layout: layout of caches, ``"NHD"`` or ``"HND"``.
        use_cuda_graph: copy tables to the buffers below. A captured ``run()`` then serves all plans with
            their number of requests.
        qo_indptr_buf, paged_kv_indptr_buf: ``[batch_size + 1]`` int32.
        paged_kv_indices_buf: int32, with the largest length of ``paged_kv_indices``.
        paged_kv_last_page_len_buf: ``[batch_size]`` int32.
        custom_mask_buf: uint8, with the largest length of packed masks. Required for custom masks.
        mask_indptr_buf: ``[batch_size + 1]`` int32. Required for custom masks.
        backend: as for :func:`flashinfer.single_prefill_with_kv_cache`. ``plan()`` resolves ``"auto"``.
        jit_args: arguments of :func:`flashinfer.prefill.gen_customize_batch_prefill_module` without
            ``backend`` and ``device``. The constructor builds this custom variant, and ``run()`` takes its
            tensors and scalars.
        jit_kwargs: further arguments of that function by name.

    Raises:
        ValueError, TypeError: buffers, a layout or a backend that do not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: tuple[Any, ...] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._prefill_buffers(qo_indptr_buf, custom_mask_buf, mask_indptr_buf)
        self._paged_buffers = self._paged_graph_buffers(
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        o_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Schedule the work of a batch. Call this method whenever lengths change.

        Args:
            qo_indptr: ``[batch_size + 1]`` integers, the first query of each request in ``q``. Tables on the
                CPU need no wait; one copy reads all tables of a GPU back. The table may be a slice of a
                longer one. Rows before its first offset belong to no request, and ``run()`` does not write
                them.
            paged_kv_indptr: ``[batch_size + 1]`` integers, the first page of each request in
                ``paged_kv_indices``. It may be a slice of a longer table, together with the whole
                ``paged_kv_indices``.
            paged_kv_indices: ``[paged_kv_indptr[-1]]`` integers or longer, the pages. Requests may share
                pages.
            paged_kv_last_page_len: ``[batch_size]`` integers, tokens of each request's last page, 1 to
                ``page_size``. A request without pages has no keys, and its entry is ignored.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: sizes of the runs.
                ``head_dim_vo`` is ``head_dim_qk`` by default.
            custom_mask: bool, the masks ``[qo_len, kv_len]`` of all requests, flattened, one after another.
                Or the matrix of one request, or ``[batch_size, qo_len, kv_len]`` of equally long requests.
            packed_custom_mask: the bits of the masks, each request's padded to whole bytes, from
                :func:`flashinfer.segment_packbits` with ``bitorder="little"``. It has priority over
                ``custom_mask``, and both have priority over ``causal``.
            causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left: as for
                :func:`flashinfer.single_prefill_with_kv_cache`.
            logits_soft_cap, rope_scale, rope_theta: likewise. With ``jit_args``, the variant's parameters replace
                most of these options: ``sm_scale`` is ignored, and a mode or a cap is an error.
            q_data_type, kv_data_type: dtypes of the runs. ``kv_data_type`` is ``q_data_type`` by default.
            non_blocking: copy tables in pinned memory without waiting. They must not change before the copies
                are done. Every other table may change after this call.
            prefix_len_ptr: ``[batch_size]`` uint32 for multi-item scoring. A request's keys are a prefix of
                this length and then items. Each item sees the prefix and itself.
            token_pos_in_items_ptr: ``[batch_size * token_pos_in_items_len]`` uint16: for each key after the
                prefix its distance from the delimiter before its item, 0 at a delimiter.
            token_pos_in_items_len: elements of each request in ``token_pos_in_items_ptr``. Unused ones are 0.
                The last request may omit them.
            max_item_len_ptr: ``[batch_size]`` uint16, the longest item of each request.
            block_tables: ``None``. ``paged_kv_indices`` names the pages.
            seq_lens: ``[batch_size]``, lengths of keys. Not read, because the tables contain them.
            fixed_split_size: split keys at multiples of this many pages. A request's result is then bit-equal
                in every batch. ``None`` and -1: balance the work. A CUDA graph may have too few slots for the
                splits of longer requests, which is an error of ``plan()``.
            disable_split_kv: never split keys, with the same effect on results. It has priority over
                ``fixed_split_size``.
            o_data_type: dtype of the output, ``q_data_type`` by default.
            max_token_per_sequence, max_sequence_kv: accepted and ignored.

        Raises:
            ValueError: tables, masks, sizes or modes that do not fit, a buffer that is too small, or a plan
                that exceeds the sizes of a captured CUDA graph.
            TypeError: dtypes that do not fit.

        Under CUDA graphs the first plan fixes the sizes for later ones. A replay uses the captured scales,
        windows, modes and dtypes, and the current tables.
        """
        op = self._plan_op
        settings = plan_settings(
            op,
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            (q_data_type, kv_data_type, self._dtype_o or o_data_type),
            bool(causal),
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            (fixed_split_size, disable_split_kv),
            page_size,
            default=self._default_rule,
        )
        queries, indptr = index_table(op, "qo_indptr", qo_indptr), index_table(op, _TABLES[0], paged_kv_indptr)
        indices, last = (
            index_table(op, _TABLES[1], paged_kv_indices),
            index_table(op, _TABLES[2], paged_kv_last_page_len),
        )
        masks = mask_request(
            op, custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
            max_item_len_ptr, self._mask_buffers,
        )  # fmt: skip
        if any(one is not None for one in (seq_lens, block_tables, max_token_per_sequence, max_sequence_kv)):
            check_hints(
                op, indptr.numel() - 1, seq_lens, block_tables, max_token_per_sequence=max_token_per_sequence,
                max_sequence_kv=max_sequence_kv,
            )  # fmt: skip
        tables = HostTables(queries, None, indptr, indices, last)
        buffers = (self._qo_indptr_buf, *self._paged_buffers)
        self._plan_request(PlanRequest(op, settings, tables, _TABLES, buffers, masks, non_blocking))
        if not self._use_cuda_graph:
            self._paged_kv_last_page_len_buf = last

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, longer with CUDA graphs.
            paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a ``(k_cache, v_cache)``
                pair without the dimension of 2. The last dimension is contiguous; other strides are free. On
                CUDA rows start at multiples of 16 bytes. Slots that no request owns have no effect.
            args: with ``jit_args``, the variant's additional tensors, then its scalars.
                The wrapper passes ``maybe_alibi_slopes``, ``maybe_custom_mask`` and ``maybe_mask_indptr`` if
                the call omits them all.
            q_scale, k_scale, v_scale: as ``scale_q``, ``scale_k`` and ``scale_v`` of
                :func:`flashinfer.single_prefill_with_kv_cache`.
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]`` to write the output to. Allocated by default.
            lse: ``[qo_indptr[-1], num_qo_heads]`` float32, contiguous, to write the lse to.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted and ignored.
            window_left: ``None`` or the planned value.
            sinks: ``[num_qo_heads]`` float32, a logit of each query head after scale and cap. It joins the
                softmax denominator of the head's rows and has no value. The lse includes it.
            kv_cache_sf: ``None``. Caches of 4 bits are not supported.

        Returns:
            ``[qo_indptr[-1], num_qo_heads, head_dim_vo]`` of ``o_data_type``. With ``return_lse`` also
            ``[qo_indptr[-1], num_qo_heads]`` float32, in base 2.

        Raises:
            ValueError: no plan, or shapes, strides or devices that do not fit it.
            TypeError: dtypes that do not fit it.
        """
        if not (window_left is None and kv_cache_sf is None):
            check_run(f"{self._name}.run", self._window_left, window_left, kv_cache_sf)
        return self._run_paged(q, paged_kv_cache, args, (q_scale, k_scale, v_scale), out, lse, return_lse, sinks)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run with options that replace those of :meth:`plan` until the next plan. Deprecated.

        Options are arguments of the kernels, so layers may alternate, also in a captured graph. No new plan
        is made if the last one holds all visible keys. If masks or windows differ, plan without them.

        Raises:
            ValueError, TypeError: as :meth:`plan` and :meth:`run`.
            CaptureError: a CUDA graph is being captured, and the options need another plan.
        """
        self._use_options(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
            CAUSAL if causal else NON_CAUSAL,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
