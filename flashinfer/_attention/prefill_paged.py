"""The wrapper of prefill over a paged cache."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from .._ops.indices import index_table, index_tables
from .accepted import check_hints, check_run, cut_of
from .arguments import CAUSAL, NON_CAUSAL, PagedCache, logits_of
from .lists import Shape
from .masks import MaskRequest, multi_item
from .prefill_wrapper import BatchPrefill
from .scales import Scale
from .tables import Tables


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Attention of a batch of requests over a paged cache.

    ``plan()`` once for each set of lengths, then ``run()`` as often as there are layers.

    Args:
        float_workspace_buffer: contiguous, of any dtype, on the device that the wrapper is for: partial results of keys
            that are split lie there. 128 MiB are plenty; one that is too small is an error of ``plan()``.
        kv_layout: of caches, ``"NHD"`` or ``"HND"``.
        use_cuda_graph: ``run()`` will be captured, and ``plan()`` serve its replays: tables then lie in the buffers below,
            and the number of requests is theirs.
        qo_indptr_buf, paged_kv_indptr_buf: ``[batch_size + 1]`` int32.
        paged_kv_indices_buf: int32, as long as ``paged_kv_indices`` will ever be.
        paged_kv_last_page_len_buf: ``[batch_size]`` int32.
        custom_mask_buf: uint8, as long as packed masks will ever be; needed where plans have custom masks.
        mask_indptr_buf: ``[batch_size + 1]`` int32, with it.
        backend: as for :func:`flashinfer.single_prefill_with_kv_cache`; chosen by each plan.
        jit_args: the arguments of :func:`flashinfer.prefill.gen_customize_batch_prefill_module` less ``backend`` and ``device``: a variant of
            your own, which is built here. ``run()`` then takes its additional tensors and scalars.

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
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
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
        """Balance the work of a batch; to be called whenever lengths change.

        Args:
            qo_indptr: ``[batch_size + 1]`` integers, where each request's queries begin in ``q``. On the CPU nothing is
                waited for; tables of a GPU are read back once, all in one copy. The table may be a slice of a longer one:
                rows before its first offset belong to no request, and ``run()`` does not write them.
            paged_kv_indptr: ``[batch_size + 1]`` integers, where each request's pages begin in ``paged_kv_indices``. It may
                be a slice of a longer table, beside the whole ``paged_kv_indices``.
            paged_kv_indices: ``[paged_kv_indptr[-1]]`` integers or longer, the pages; requests may share some.
            paged_kv_last_page_len: ``[batch_size]`` integers, entries of each request's last page, 1 to ``page_size``. A request
                without pages has no keys, and its entry here means nothing.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: of what will be run; ``head_dim_vo`` is
                ``head_dim_qk`` by default.
            custom_mask: bool, the masks ``[qo_len, kv_len]`` of all requests, flattened, one after the other; or the
                matrix of one request, or ``[batch_size, qo_len, kv_len]`` of equally long ones.
            packed_custom_mask: their bits, each request's padded to whole bytes, as :func:`flashinfer.segment_packbits`
                packs them with ``bitorder="little"``; goes before ``custom_mask``, and both before ``causal``.
            causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta:
                as for :func:`flashinfer.single_prefill_with_kv_cache`. With ``jit_args`` the variant's parameters stand for most of
                them: ``sm_scale`` is not used, a mode or a cap is an error.
            q_data_type, kv_data_type: of what will be run; ``kv_data_type`` is ``q_data_type`` by default.
            non_blocking: whether tables in pinned memory are copied without waiting: they must then stay as they are until
                the copies are done. All others may change once this returns.
            prefix_len_ptr: ``[batch_size]`` uint32: multi-item scoring: the keys of a request are a prefix of this length and
                then items, each of which sees the prefix and itself.
            token_pos_in_items_ptr: ``[batch_size * token_pos_in_items_len]`` uint16: for each key behind the prefix, how far
                it is from the delimiter before its item, 0 at a delimiter.
            token_pos_in_items_len: entries of each request there; unused ones are 0, and the last request's may be left out.
            max_item_len_ptr: ``[batch_size]`` uint16, the longest item of each request.
            block_tables: ``None``: pages are named by ``paged_kv_indices``.
            seq_lens: ``[batch_size]``, lengths of keys, which the tables say too: not read.
            fixed_split_size: keys are cut at multiples of so many pages, whatever the batch: a request's result is then the
                same, bit for bit, alone and in every batch. ``None`` and -1: cut as balances the work. A CUDA graph may have
                no room for the pieces of longer requests, which is an error of ``plan()``.
            disable_split_kv: never cut keys; goes before ``fixed_split_size``, with the same effect on results.
            o_data_type: of the output, ``q_data_type`` by default.
            max_token_per_sequence, max_sequence_kv: accepted.

        Raises:
            ValueError: tables, masks, sizes or modes that do not fit, a buffer that is too small (which, wanted, got), or a
                plan beyond what a CUDA graph was captured with.
            TypeError: dtypes that do not fit.

        Under CUDA graphs the first plan fixes what later ones must fit into. Scales, windows, modes and dtypes are captured
        as they are; what a replay follows are the tables.
        """
        op = f"{self._name}.plan"
        shape = Shape.of(
            op, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type,
            self._dtype_o or o_data_type,
        )  # fmt: skip
        logits = logits_of(
            op, head_dim_qk, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        given = {
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        items = multi_item(op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        pages = index_tables(op, **given)
        check_hints(
            op, pages["paged_kv_indptr"].numel() - 1, seq_lens, block_tables, max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
        )  # fmt: skip
        self._cut = cut_of(op, fixed_split_size, disable_split_kv, page_size)
        self._plan_paged(
            Tables(op, self.device, non_blocking),
            index_table(op, "qo_indptr", qo_indptr),
            pages,
            page_size,
            shape,
            logits,
            bool(causal),
            MaskRequest(custom_mask, packed_custom_mask, items, self._mask_buffers),
        )

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
        """Attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; under CUDA graphs it may be longer.
            paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a ``(k_cache, v_cache)`` pair without the
                dimension of 2. Strides are free but for the last dimension, which is contiguous; on CUDA rows start at
                multiples of 16 bytes. What lies in places that no request owns has no influence, whatever it is.
            args: with ``jit_args``, the variant's additional tensors, then its scalars.
            q_scale, k_scale, v_scale: as ``scale_q``, ``scale_k`` and ``scale_v`` of :func:`flashinfer.single_prefill_with_kv_cache`.
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]``, to be written; made by default.
            lse: ``[qo_indptr[-1], num_qo_heads]`` float32, contiguous, to be written where it is given.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted.
            window_left: ``None``, or what was planned.
            sinks: ``[num_qo_heads]`` float32, a logit of each query head that joins the softmax of its rows, behind scale and
                cap, and has no value: weights of keys then add up to less than 1, and the lse has it too.
            kv_cache_sf: ``None``: there are no caches of 4 bits.

        Raises:
            ValueError: no plan, or shapes, strides or devices other than those planned for.
            TypeError: dtypes other than those planned for.
        """
        if not (window_left is None and kv_cache_sf is None):
            check_run(f"{self._name}.run", self._window_left, window_left, kv_cache_sf=kv_cache_sf)
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
        """Deprecated: :meth:`run` with options that take the place of those of :meth:`plan`, until the next plan.

        They are arguments of the kernels: layers may alternate, also in a captured graph, and no plan is made for them
        where the last one holds all keys that they see: plan without a mask and without a window where these differ.

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
