"""Multi-head latent attention (MLA) over a paged cache of latents, with absorbed projections.

All heads read one cache. A row has 512 latent elements ``ckv`` and 64 rotated elements ``kpe``. Keys are both
parts, values are the latent part: ``P = softmax((q_nope . ckv + q_pe . kpe) * sm_scale)``, ``O = P ckv``. A model
without rotary keys has no ``kpe``.

Source: DeepSeek-AI: DeepSeek-V2, 2024, section 2.1.
"""

from __future__ import annotations

import math

import torch

from ._attention.arguments import check_sinks
from ._compat.refused import declare
from ._mla.arguments import UNPLANNED, UNSCALED, options_of, parts_of, refuse, scales_of
from ._mla.wrapper import MlaWrapper
from ._ops.arguments import all_or_none
from ._ops.numbers import check_option, check_range, whole
from ._ops.tensors import check_dims
from .jit.modules.mla import gen_batch_decode_mla_module, gen_batch_mla_module

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "gen_batch_decode_mla_module",
    "gen_batch_mla_module",
    *declare(globals()),
]
_LN2 = math.log(2)
_NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DEFAULT_SCALE = (128 + 64) ** -0.5  # the head_dim before the projections are absorbed


class BatchMLAPagedAttentionWrapper(MlaWrapper):
    """MLA of a batch of requests with any numbers of query tokens.

    The logit of a query and a key is ``(q_nope . ckv + q_pe . kpe) * sm_scale``. The output is a weighted sum
    of ``ckv``.

    Args:
        float_workspace_buffer: memory for partial states of split keys. Its device is the wrapper's device.
        use_cuda_graph: copy tables to the buffers below. One captured graph then serves all plans with the
            same number of requests.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: those buffers, int32. Required with ``use_cuda_graph``.
        backend: ``"auto"``, ``"fa2"`` for the portable kernels, or ``"fa3"`` for those for Hopper.
            Portable kernels read caches of 8 bits for both. ``"cutlass"`` means ``"auto"``.

    Raises:
        ValueError: a backend that the device does not have, or a buffer that is missing or of another form.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            float_workspace_buffer, use_cuda_graph, backend,
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr,
        )  # fmt: skip
        self._options = UNPLANNED

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype | str,
        kv_data_type: torch.dtype | str,
        use_profiler: bool = False,
        *,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str | None = None,
        output_dtype: torch.dtype | str | None = None,
        scale_mode: str | None = None,
        use_sinks: bool | None = None,
        metadata: None = None,
        cum_seq_lens_q: None = None,
        block_tables: None = None,
        seq_lens: None = None,
        max_q_len: None = None,
    ) -> None:
        """Balance the work of a batch. Every run until the next plan uses it.

        Args:
            qo_indptr: ``[batch_size + 1]`` integers, the first query of each request.
            kv_indptr: ``[batch_size + 1]`` integers, the first page of each request in ``kv_indices``. This
                table and ``qo_indptr`` may be slices of longer ones.
            kv_indices: integers, pages of the cache.
            kv_len_arr: ``[batch_size]`` integers, keys of each request, 0 or more. Pages may hold more.
            num_heads: query heads.
            head_dim_ckv: 512.
            head_dim_kpe: 64, or 0 for a model without rotary keys. Kernels then read zeros in their place.
            page_size: tokens of a page.
            causal: hide keys after a query's position. A request's last query has the position of its last
                key.
            sm_scale: factor of the logits, positive. Factors of a model's RoPE scaling, such as YaRN's, belong to it.
            q_data_type: float16 or bfloat16. float32 on the CPU only.
            kv_data_type: the same, or float8_e4m3fn. Backend ``"fa3"`` takes it with bfloat16 queries only.
            use_profiler: run kernels that write events to each run's ``profiler_buffer``: docs/profiling.md.
            query_layout, kv_cache_layout: ``"split"`` or ``"packed"``. Each run may pass either form.
            lse_mode: the lse of each run: ``"none"``, ``"base2"`` or ``"basee"``. ``None`` leaves it to the run.
            output_dtype: ``q_data_type``.
            scale_mode: ``"default"`` or ``"kv-per-tensor"``. Arguments of each run select its scales.
            use_sinks: true if each run has ``sinks``, false if none has. ``None`` leaves it to the run.
            metadata, cum_seq_lens_q, block_tables, seq_lens, max_q_len: not supported: ``None``.

        Raises:
            ValueError: tables that do not fit each other, sizes or dtypes without kernels, or a workspace
                that is too small.
            TypeError: tables that are no integers.
            UnsupportedError: tables of another form, or another output dtype.
        """
        options, tables = UNPLANNED, (metadata, cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        given = (query_layout, kv_cache_layout, lse_mode, output_dtype, scale_mode, use_sinks, *tables)
        if set(map(type, given)) != {type(None)}:  # most plans have no option, and save the checks
            options = options_of(
                f"{self._name}.plan", q_data_type, lse_mode, use_sinks, output_dtype, scale_mode,
                dict(query_layout=query_layout, kv_cache_layout=kv_cache_layout),
                metadata=metadata, cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens,
                max_q_len=max_q_len,
            )  # fmt: skip
        self._plan(
            _NAMES, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, (head_dim_ckv, head_dim_kpe), page_size,
            causal, sm_scale, q_data_type, kv_data_type, profiler=bool(use_profiler),
        )  # fmt: skip
        self._options = options

    # ckv_scale_arr is not keyword-only: vLLM takes a keyword-only one for FlashInfer's plans, and writes into them.
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        *,
        query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
        kv_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: None = None,
        bmm1_scale: None = None,
        bmm2_scale: None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q_nope: ``[queries, num_heads, 512]`` of ``q_data_type``.
            q_pe: ``[queries, num_heads, head_dim_kpe]`` of ``q_data_type``, rotated.
            ckv_cache: ``[pages, page_size, 512]`` of ``kv_data_type``, rows with any strides.
            kpe_cache: ``[pages, page_size, head_dim_kpe]`` of ``kv_data_type``, rotated.
            out: ``[queries, num_heads, 512]`` to write the output to. Allocated by default.
            lse: ``[queries, num_heads]`` float32 to write the lse to.
            return_lse: also return the lse in base 2. A query without keys has ``-inf``, or its head's sink.
            profiler_buffer: ``[words]`` uint64 or int64 for events. Required after a plan with
                ``use_profiler``, ``None`` after others. Events that do not fit are counted and dropped.
            kv_len: ``[batch_size]`` integers, with ``page_table``: plan one query per request in this call.
            page_table: ``[batch_size, pages]`` integers, pages of each request.
            return_lse_base_on_e: write and return natural logarithms instead.
            o_scale, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale: not supported: ``None``.
            ckv_scale_arr: ``[pages, page_size, 4]`` float32, factors of each token's latents in groups of 128, in the
                place of ``ckv_scale``. Rows have any strides. Queries are bfloat16. CUDA kernels round the products
                to bfloat16, and are built on first use.
            query, kv_cache: ``(q_nope, q_pe)`` and ``(ckv_cache, kpe_cache)``, or tensors that have both parts in
                their last dimension, in the place of these arguments.
            ckv_scale, kpe_scale: factors of the elements of the two caches, positive. Both are required for caches
                of 8 bits, unless ``kv_scale`` is given. Other caches have none.
            kv_scale: factor of all elements of both caches, positive. ``None`` means 1 without 8 bits.
            sinks: ``[num_heads]`` float32, a logit of each head after ``sm_scale``, in natural units. It joins the
                softmax denominator of every query and has no value.

        Returns:
            ``[queries, num_heads, 512]`` of ``q_nope``'s dtype. With ``return_lse`` also ``[queries,
            num_heads]`` float32. A query without keys has output 0.

        Raises:
            ValueError, TypeError: tensors that do not fit the plan or each other.
            UnsupportedError: an argument that only other libraries' kernels serve.
            RuntimeError: no plan.
        """
        op = f"{self._name}.run"
        refuse(
            op, o_scale=o_scale, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale,
        )  # fmt: skip
        q_nope, q_pe = parts_of(op, ("query", "q_nope", "q_pe"), query, q_nope, q_pe)
        ckv_cache, kpe_cache = parts_of(op, ("kv_cache", "ckv_cache", "kpe_cache"), kv_cache, ckv_cache, kpe_cache)
        if kv_len is not None or page_table is not None:
            all_or_none(op, kv_len=kv_len, page_table=page_table)
            assert kv_len is not None and page_table is not None
            self._plan_of_table(q_nope, q_pe, ckv_cache, kv_len, page_table)
        planned, scales, has_lse = self._planned, UNSCALED, lse is not None or return_lse
        if planned is not None:
            lse_mode = "none" if not has_lse else "basee" if return_lse_base_on_e else "base2"
            self._options.check_run(op, lse_mode, sinks is not None)
            eight_bits = planned.kv_dtype.itemsize == 1
            scales = scales_of(op, planned.dtype, ckv_cache, eight_bits, ckv_scale, ckv_scale_arr, kpe_scale, kv_scale)
            if sinks is not None:
                check_sinks(op, sinks, planned.num_heads, self.device, False)
        result = self._run(
            planned, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, profiler_buffer=profiler_buffer,
            scales=scales, sinks=sinks,
        )  # fmt: skip
        if return_lse_base_on_e and has_lse:
            (result[1] if lse is None else lse).mul_(_LN2)
        return result

    def _plan_of_table(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kv_len: torch.Tensor,
        page_table: torch.Tensor,
    ) -> None:
        op = f"{self._name}.run"
        given = dict(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache)
        for name, x in given.items():
            check_dims(op, name, x, 3)
        check_dims(op, "page_table", page_table, 2)
        batch_size, pages = page_table.shape
        before = self._planned
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device="cpu")
        self._plan(
            _NAMES, starts, starts * pages, page_table.reshape(-1), kv_len, q_nope.shape[1],
            (q_nope.shape[2], q_pe.shape[2]), ckv_cache.shape[1], False, _DEFAULT_SCALE if before is None else before.sm_scale,
            q_nope.dtype, ckv_cache.dtype, profiler=before is not None and before.operators.profiler,
        )  # fmt: skip

    def run_return_lse(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the lse of :meth:`run`."""
        return self.run(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse=True)


class BatchDecodeMlaWithPagedKVCacheWrapper(MlaWrapper):
    """MLA of a batch of requests with one query token each.

    Args:
        float_workspace_buffer: memory for partial states of split keys. Its device is the wrapper's device.
        use_cuda_graph: copy tables to the buffers below. One captured graph then serves all plans with the
            same number of requests.
        use_tensor_cores: accepted and ignored.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: those buffers, int32.

    Raises:
        ValueError: a buffer that is missing or of another form.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer, use_cuda_graph, "auto",
            indptr=paged_kv_indptr_buffer, indices=paged_kv_indices_buffer,
            last_page_len=paged_kv_last_page_len_buffer,
        )  # fmt: skip

    @property
    def use_tensor_cores(self) -> bool:
        """True if tensor cores compute the products."""
        return self.device.type == "cuda"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: torch.dtype | str = "float16",
        q_data_type: torch.dtype | str | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Balance the work of a batch. Every run until the next plan uses it.

        Args:
            indptr: ``[batch_size + 1]`` integers, the first page of each request in ``indices``. It may be a
                slice of a longer table.
            indices: integers, pages of the cache.
            last_page_len: ``[batch_size]`` integers, tokens of each request's last page.
            num_qo_heads: query heads.
            head_dim_compressed_kv: 512.
            page_size: tokens of a page.
            sm_scale: factor of the logits, positive.
            window_left, logits_soft_cap: not supported: -1, and ``None`` or 0.
            data_type: dtype of caches.
            q_data_type: dtype of queries, by default ``data_type``. Only caches of float8_e4m3fn may differ
                from it.
            rope_scale, rope_theta: accepted and ignored. Queries and keys must be rotated.

        Raises:
            ValueError: tables that do not fit each other, sizes or dtypes without kernels, or a workspace
                that is too small.
            TypeError: tables that are no integers.
        """
        op = f"{self._name}.plan"
        window = whole(op, "window_left", window_left)
        check_range(op, "window_left", window, most=-1, why=": a query sees all keys")
        check_option(op, "logits_soft_cap", logits_soft_cap, (None, 0))
        self._plan(
            ("qo_indptr", "indptr", "indices", "last_page_len"), None, indptr, indices, last_page_len, num_qo_heads,
            (head_dim_compressed_kv, 64), page_size, False, sm_scale,
            data_type if q_data_type is None else q_data_type, data_type, last_page=True,
        )  # fmt: skip

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        paged_ckv_cache: torch.Tensor,
        paged_kpe_cache: torch.Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q_nope, q_pe: ``[batch_size, num_qo_heads, 512]`` and ``[batch_size, num_qo_heads, 64]`` of
                ``q_data_type``.
            paged_ckv_cache, paged_kpe_cache: ``[pages, page_size, 512]`` and ``[pages, page_size, 64]`` of
                ``data_type``.
            q_scale, k_scale: factors of the logits.
            v_scale: factor of the output.
            out: ``[batch_size, num_qo_heads, 512]`` to write the output to. Allocated by default.
            lse: ``[batch_size, num_qo_heads]`` float32 to write the lse to.
            return_lse: also return the lse, as :meth:`BatchMLAPagedAttentionWrapper.run` does.
            enable_pdl: accepted and ignored. Kernels use programmatic dependent launch if the device supports
                it.

        Returns:
            ``[batch_size, num_qo_heads, 512]`` of ``q_nope``'s dtype. With ``return_lse`` also
            ``[batch_size, num_qo_heads]`` float32.

        Raises:
            ValueError, TypeError: tensors that do not fit the plan or each other.
            RuntimeError: no plan.
        """
        scale = (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
        return self._run(
            self._planned, q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out, lse, return_lse, scale,
            1.0 if v_scale is None else v_scale,
        )  # fmt: skip

    def run_return_lse(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        paged_ckv_cache: torch.Tensor,
        paged_kpe_cache: torch.Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the lse of :meth:`run`."""
        return self.run(q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, q_scale, k_scale, v_scale, return_lse=True)
