"""Multi-head latent attention (MLA) over a paged cache of latents, with absorbed projections.

All heads read one cache. A row has 512 latent elements ``ckv`` and 64 rotated elements ``kpe``. Keys are both
parts,
values are the latent part: ``P = softmax((q_nope . ckv + q_pe . kpe) * sm_scale)``, ``O = P ckv``.

Source: DeepSeek-AI: DeepSeek-V2, 2024, section 2.1.
"""

from __future__ import annotations

import math

import torch

from ._compat.refused import declare
from ._mla.wrapper import MOST_SCALE, MlaWrapper
from ._ops.arguments import all_or_none, check_none, check_not_both, check_present
from ._ops.numbers import check_option, check_range, positive_real, whole
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
    ) -> None:
        """Balance the work of a batch. Every run until the next plan uses it.

        Args:
            qo_indptr: ``[batch_size + 1]`` integers, the first query of each request.
            kv_indptr: ``[batch_size + 1]`` integers, the first page of each request in ``kv_indices``. This
                table and ``qo_indptr`` may be slices of longer ones.
            kv_indices: integers, pages of the cache.
            kv_len_arr: ``[batch_size]`` integers, keys of each request, 0 or more. Pages may hold more.
            num_heads: query heads.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            page_size: tokens of a page.
            causal: hide keys after a query's position. A request's last query has the position of its last
                key.
            sm_scale: factor of the logits, positive.
            q_data_type: float16 or bfloat16. float32 on the CPU only.
            kv_data_type: the same, or float8_e4m3fn. Backend ``"fa3"`` takes it with bfloat16 queries only.
            use_profiler: run kernels that write events to each run's ``profiler_buffer``: docs/profiling.md.

        Raises:
            ValueError: tables that do not fit each other, sizes or dtypes without kernels, or a workspace
                that is too small.
            TypeError: tables that are no integers.
        """
        self._plan(
            _NAMES, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, (head_dim_ckv, head_dim_kpe), page_size,
            causal, sm_scale, q_data_type, kv_data_type, profiler=bool(use_profiler),
        )  # fmt: skip

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
        kv_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q_nope: ``[queries, num_heads, 512]`` of ``q_data_type``.
            q_pe: ``[queries, num_heads, 64]`` of ``q_data_type``, rotated.
            ckv_cache: ``[pages, page_size, 512]`` of ``kv_data_type``, rows with any strides.
            kpe_cache: ``[pages, page_size, 64]`` of ``kv_data_type``, rotated.
            out: ``[queries, num_heads, 512]`` to write the output to. Allocated by default.
            lse: ``[queries, num_heads]`` float32 to write the lse to.
            return_lse: also return the lse in base 2. A query without keys has ``-inf``.
            profiler_buffer: ``[words]`` uint64 or int64 for events. Required after a plan with
                ``use_profiler``, ``None`` after others. Events that do not fit are counted and dropped.
            kv_len: ``[batch_size]`` integers, with ``page_table``: plan one query per request in this call.
            page_table: ``[batch_size, pages]`` integers, pages of each request.
            return_lse_base_on_e: write and return natural logarithms instead.
            ckv_scale, kpe_scale: factors of the elements of the two caches, positive. Both are required for caches
                of 8 bits, unless ``kv_scale`` is given. Other caches have none.
            kv_scale: factor of all elements of both caches, positive. ``None`` means 1 without 8 bits.

        Returns:
            ``[queries, num_heads, 512]`` of ``q_nope``'s dtype. With ``return_lse`` also ``[queries,
            num_heads]`` float32. A query without keys has output 0.

        Raises:
            ValueError, TypeError: tensors that do not fit the plan or each other.
            RuntimeError: no plan.
        """
        if kv_len is not None or page_table is not None:
            all_or_none(f"{self._name}.run", kv_len=kv_len, page_table=page_table)
            assert kv_len is not None and page_table is not None
            self._plan_of_table(q_nope, ckv_cache, kv_len, page_table)
        planned, scale, pe_factor = self._planned, 1.0, 1.0
        if planned is not None:
            scale, pe_factor = self._scales(planned.kv_dtype.itemsize == 1, ckv_scale, kpe_scale, kv_scale)
        result = self._run(
            planned, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse,
            sm_scale=planned.sm_scale * scale if planned else None, o_scale=scale, profiler_buffer=profiler_buffer,
            pe_factor=pe_factor,
        )  # fmt: skip
        if return_lse_base_on_e and (lse is not None or return_lse):
            (result[1] if lse is None else lse).mul_(_LN2)
        return result

    def _scales(
        self, eight_bits: bool, ckv_scale: float | None, kpe_scale: float | None, kv_scale: float | None
    ) -> tuple[float, float]:
        """Return the scale of latents, and the scale of rotary keys by that of latents."""
        op = f"{self._name}.run"
        if all_or_none(op, ckv_scale=ckv_scale, kpe_scale=kpe_scale):
            check_not_both(op, "kv_scale", kv_scale, "ckv_scale and kpe_scale", ckv_scale)
            if not eight_bits:
                check_none(op, "ckv_scale", ckv_scale, "the cache has no 8 bits")
            ckv = positive_real(op, "ckv_scale", ckv_scale, MOST_SCALE)
            return ckv, positive_real(op, "kpe_scale", kpe_scale, MOST_SCALE) / ckv
        if kv_scale is None:
            if eight_bits:
                check_present(op, "ckv_scale", None, "ckv_scale and kpe_scale, or kv_scale, for a cache of 8 bits")
            return 1.0, 1.0
        return positive_real(op, "kv_scale", kv_scale, MOST_SCALE), 1.0

    def _plan_of_table(
        self, q_nope: torch.Tensor, ckv_cache: torch.Tensor, kv_len: torch.Tensor, page_table: torch.Tensor
    ) -> None:
        op = f"{self._name}.run"
        for name, x, dims in (("q_nope", q_nope, 3), ("ckv_cache", ckv_cache, 3), ("page_table", page_table, 2)):
            check_dims(op, name, x, dims)
        batch_size, pages = page_table.shape
        before = self._planned
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device="cpu")
        self._plan(
            _NAMES, starts, starts * pages, page_table.reshape(-1), kv_len, q_nope.shape[1],
            (q_nope.shape[2], 64), ckv_cache.shape[1], False, _DEFAULT_SCALE if before is None else before.sm_scale,
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
        planned, scale = self._planned, None
        if planned is not None and (q_scale is not None or k_scale is not None):
            scale = planned.sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
        return self._run(planned, q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out, lse, return_lse, scale,
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
