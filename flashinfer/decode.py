"""Attention of the newest tokens of requests: of one request, or of a batch with a paged cache.

The output is ``softmax(sm_scale * q . k) @ v``. Query head ``h`` reads key head ``h // (num_qo_heads /
num_kv_heads)``. The lse is the base-2 logarithm of the sum of ``exp(logit)``, as for
:func:`flashinfer.merge_state`. A query that sees no key has output 0 and lse ``-inf``.

Source: Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023; Ye
    et al.:
FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving, 2025.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from ._attention.accepted import check_backend, check_hints, check_queries, check_run
from ._attention.arguments import NON_CAUSAL, PagedCache, layout_of, logits_of
from ._attention.bound import BoundCalls
from ._attention.engines import equal_offsets, fast_decode_plan
from ._attention.masks import NO_MASK_REQUEST
from ._attention.one_request import attend_one, run_one
from ._attention.operators import operators_of_module
from ._attention.request import PlanRequest, plan_settings
from ._attention.scales import Scale
from ._attention.signature import HostTables
from ._attention.wrapper import BatchWrapper
from ._compat import elsewhere
from ._compat.refused import declare
from ._ops.arguments import check_as_planned
from ._ops.indices import index_table
from ._ops.numbers import check_option, whole
from ._ops.tensors import check_dims
from .jit.modules.decode import (
    gen_batch_decode_module,
    gen_customize_batch_decode_module,
    gen_customize_single_decode_module,
    gen_single_decode_module,
)

# Engines import this name from here.
from .utils import _get_range_buf as _get_range_buf

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "gen_batch_decode_module",
    "gen_customize_batch_decode_module",
    "gen_customize_single_decode_module",
    "gen_single_decode_module",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
]

# FlashInfer has these names here too. Other families are imported when they are used.
__getattr__ = elsewhere(
    __name__,
    {
        "BatchDecodeMlaWithPagedKVCacheWrapper": "mla",
        "get_seq_lens": "page",
        "trtllm_batch_decode_with_kv_cache": "xqa",
        "xqa_batch_decode_with_kv_cache": "xqa",
    },
)

_TABLES = ("indptr", "indices", "last_page_len")
_CALLS = BoundCalls("decode", 2)


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one query token over one request's keys and values.

    Args:
        q: ``[num_qo_heads, head_dim]``, the last token of the request. float16 or bfloat16; on the CPU also
            float32.
        k, v: ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND). Both
            have one dtype: ``q``'s, float8_e4m3fn or float8_e5m2. ``num_kv_heads`` divides ``num_qo_heads``.
            Strides are free; tensors that kernels cannot read are copied.
        kv_layout: ``"NHD"`` or ``"HND"``.
        pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` (rotates halves of ``q`` and ``k``) or ``"ALIBI"``
            (adds slope * distance to a logit).
        use_tensor_cores: accepted and ignored.
        q_scale, k_scale, v_scale: factors of quantised values: numbers, or tensors of one element or of one
            per head. A tensor on a GPU is multiplied into the query or the output. The host never reads it.
        window_left: keys to the left of the last key that the query sees; -1: all.
        logits_soft_cap: if positive, a logit becomes ``cap * tanh(logit / cap)``.
        sm_scale: factor of the logits, by default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta: 1 and 1e4 by default. At position ``p``, pair ``i`` is rotated by
            ``p / rope_scale * rope_theta^(-2 i / head_dim)``.
        return_lse: also return the lse.

    Returns:
        ``[num_qo_heads, head_dim]`` of ``q``'s dtype. With ``return_lse`` also ``[num_qo_heads]`` float32.

    Raises:
        ValueError: shapes, sizes, layouts, devices or modes that do not fit.
        TypeError: dtypes that do not fit.
    """
    op, scales = "single_decode_with_kv_cache", (q_scale, k_scale, v_scale)
    options = (kv_layout, pos_encoding_mode, window_left, logits_soft_cap, rope_scale, rope_theta)
    result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
    if result is not None:
        return result
    check_dims(op, "q", q, 2)
    check_dims(op, "k", k, 3)
    check_dims(op, "v", v, 3)
    logits = logits_of(
        op, q.shape[1], pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    _CALLS.bind(q, k, v, options, layout_of(op, kv_layout), NON_CAUSAL, logits)
    result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
    if result is not None:
        return result
    out, lse = attend_one("decode", op, q.unsqueeze(0), k, v, kv_layout, logits, scales, return_lse=return_lse)
    return (out.squeeze(0), lse.squeeze(0)) if lse is not None else out.squeeze(0)


def single_decode_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`single_decode_with_kv_cache` with a custom variant.

    Args:
        jit_module: result of ``gen_customize_single_decode_module(...).build_and_load()``.
        q: ``[num_qo_heads, head_dim]``.
        k, v: ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND).
        kv_layout, window_left, return_lse: as for :func:`single_decode_with_kv_cache`.
        args: the variant's additional tensors, then its scalars, in the order of their declaration.

    Returns:
        The results of :func:`single_decode_with_kv_cache`.

    Raises:
        ValueError, TypeError: as :func:`single_decode_with_kv_cache`, or arguments that do not fit the
            variant.
    """
    op = "single_decode_with_kv_cache_with_jit_module"
    check_dims(op, "q", q, 2)
    check_dims(op, "k", k, 3)
    check_dims(op, "v", v, 3)
    operators = operators_of_module(op, jit_module)
    layout = layout_of(op, kv_layout)
    out, lse = run_one(
        op, operators, q.unsqueeze(0), k, v, layout, whole(op, "window_left", window_left), args, NON_CAUSAL, return_lse
    )
    return (out.squeeze(0), lse.squeeze(0)) if lse is not None else out.squeeze(0)


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper):
    """Attention of one query token per request of a batch, or of equally many, over a paged cache.

    Call ``plan()`` once for each set of lengths, then ``run()`` for each layer.

    Args:
        float_workspace_buffer: contiguous memory of any dtype for partial states of split keys. Its device is
            the wrapper's device. 128 MiB suffice; ``plan()`` raises an error if it is too small.
        kv_layout: layout of caches, ``"NHD"`` or ``"HND"``.
        use_cuda_graph: copy tables to the buffers below. A captured ``run()`` then serves all plans with
            their number of requests.
        use_tensor_cores: required for several queries of each request, else without effect.
        paged_kv_indptr_buffer: ``[batch_size + 1]`` int32, for ``indptr``.
        paged_kv_indices_buffer: int32, with the largest length of ``indices``.
        paged_kv_last_page_len_buffer: ``[batch_size]`` int32, for ``last_page_len``.
        jit_args: arguments of :func:`gen_customize_batch_decode_module` without ``backend``. The constructor
            builds this custom variant, and ``run()`` takes its tensors and scalars.
        backend: ``"auto"`` and ``"fa2"``: portable kernels. ``"fa3"``: kernels for compute capability 9.0,
            which merge splits in the same launch. They support neither RoPE on the fly nor ``jit_args``.

    Raises:
        ValueError, TypeError: buffers, a layout or a backend that do not fit.
    """

    _few_queries = True

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: tuple[Any, ...] | None = None,
        backend: str = "auto",
    ) -> None:
        check_backend(type(self).__name__, backend, ("auto", "fa2", "fa3"), jit_args)
        if jit_args is not None:
            why = " with jit_args: your own variant is built for the portable kernels"
            check_option(type(self).__name__, "backend", backend, ("auto", "fa2"), why)
        self._backend = backend
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, gen_customize_batch_decode_module, jit_args)
        self._use_tensor_cores = bool(use_tensor_cores)
        self._paged_buffers = self._paged_graph_buffers(
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )

    @property
    def use_tensor_cores(self) -> bool:
        """Value of the constructor's argument."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        o_data_type: str | torch.dtype | None = None,
        q_len_per_req: int = 1,
    ) -> None:
        """Balance the work of a batch. Call it whenever lengths change.

        Args:
            indptr: ``[batch_size + 1]`` integers, the first page of each request in ``indices``. Tables on
                the CPU need no wait; one copy reads all tables of a GPU back. The table may be a slice of a
                longer one, together with the whole ``indices``.
            indices: ``[indptr[-1]]`` integers or longer, the pages. Requests may share pages.
            last_page_len: ``[batch_size]`` integers, tokens of each request's last page, 1 to ``page_size``.
                A request without pages has no keys, and its entry is ignored.
            num_qo_heads, num_kv_heads, head_dim, page_size: sizes of the runs.
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta: as for
                :func:`single_decode_with_kv_cache`. With ``jit_args``, the variant's parameters replace most
                of them: ``sm_scale`` is ignored, and a mode or a cap is an error.
            q_data_type, kv_data_type: dtypes of the runs. ``kv_data_type`` is ``q_data_type`` by default.
            data_type: default of ``q_data_type`` and ``kv_data_type`` if they are ``None``.
            non_blocking: copy tables in pinned memory without waiting. They must not change before the copies
                are done. Every other table may change after this call.
            block_tables: ``None``. ``indices`` names the pages.
            seq_lens: ``[batch_size]``, lengths of keys. Not read, because the tables give them.
            fixed_split_size: split keys at multiples of this many pages. A request's result is then bit-equal
                in every batch. ``None`` and -1: balance the work. A CUDA graph may have too few slots for the
                splits of longer requests, which is an error of ``plan()``.
            disable_split_kv: never split keys, with the same effect on results. It has priority over
                ``fixed_split_size``.
            o_data_type: dtype of the output, by default ``q_data_type``, or float16 for queries of 8 bits.
            q_len_per_req: the queries of each request. More than 1, as in speculative decoding, need
                ``use_tensor_cores``. They are the last tokens of the request, and their keys are in the cache:
                query ``i`` sees the first ``kv_len - q_len_per_req + 1 + i`` keys.

        Raises:
            UnsupportedError: several queries of each request with backend ``"fa3"`` or with ``jit_args``.
            ValueError: several queries without ``use_tensor_cores``, or more than a request's keys, or another
                number of queries than the first plan's under CUDA graphs; tables, sizes or modes that do not fit,
                a buffer that is too small, or a plan that exceeds the sizes of a captured CUDA graph.
            TypeError: dtypes that do not fit.

        Under CUDA graphs the first plan fixes the sizes for later ones. A replay uses the captured scales,
        windows, modes and dtypes, and the current tables.
        """
        op = self._plan_op
        if not (q_len_per_req == 1 and type(q_len_per_req) is int):
            check_queries(op, q_len_per_req, self._use_tensor_cores, self._backend, self._custom is not None)
        if q_len_per_req != self._q_len_per_req:
            self._refuse_frozen(op, q_len_per_req)
        settings = plan_settings(
            op,
            (num_qo_heads, num_kv_heads, head_dim, None),
            (q_data_type or data_type or "float16", kv_data_type or data_type, self._dtype_o or o_data_type),
            q_len_per_req > 1,
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            (fixed_split_size, disable_split_kv),
            page_size,
            default=self._default_rule,
        )
        indptr = index_table(op, "indptr", indptr)
        indices, last = index_table(op, "indices", indices), index_table(op, "last_page_len", last_page_len)
        if seq_lens is not None or block_tables is not None:
            check_hints(op, indptr.numel() - 1, seq_lens, block_tables)
        queries = None if q_len_per_req == 1 else equal_offsets(indptr.numel() - 1, q_len_per_req)
        tables = HostTables(queries, None, indptr, indices, last)
        before = self._q_len_per_req
        self._q_len_per_req = q_len_per_req
        try:
            self._plan_request(
                PlanRequest(op, settings, tables, _TABLES, (None, *self._paged_buffers), NO_MASK_REQUEST, non_blocking)
            )
        except BaseException:
            self._q_len_per_req = before  # the last plan is still there
            raise
        if not self._use_cuda_graph:
            self._paged_kv_last_page_len_buf = last

    begin_forward = plan

    @property
    def _family(self) -> str:  # type: ignore[override]
        """Kernels of the plan. Those of prefill serve several queries of each request."""
        return "decode" if self._q_len_per_req == 1 else "prefill"

    def _refuse_frozen(self, op: str, q_len_per_req: int) -> None:
        if self._use_cuda_graph and self._planned is not None:
            raise ValueError(
                f"{op}: q_len_per_req: got {q_len_per_req}, wanted {self._q_len_per_req}, frozen by the first plan:"
                " a captured CUDA graph has its shape"
            )

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
        q_len_per_req: int | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q: ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, the queries of a request together.
            paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a ``(k_cache, v_cache)``
                pair without the dimension of 2. The last dimension is contiguous; other strides are free. On
                CUDA rows start at multiples of 16 bytes. Slots that no request owns have no effect.
            args: with ``jit_args``, the variant's additional tensors, then its scalars.
                The wrapper passes ``maybe_alibi_slopes``, ``maybe_custom_mask`` and ``maybe_mask_indptr`` if
                the call omits them all.
            q_scale, k_scale, v_scale: as for :func:`single_decode_with_kv_cache`.
            out: ``q``'s shape, to write the output to. Allocated by default.
            lse: ``[batch_size * q_len_per_req, num_qo_heads]`` float32, contiguous, to write the lse to.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted and ignored.
            window_left: ``None`` or the planned value.
            sinks: ``[num_qo_heads]`` float32, a logit of each query head after scale and cap. It joins the
                softmax denominator of the head's rows and has no value. The lse includes it.
            q_len_per_req: ``None`` or the planned value.
            kv_cache_sf: ``None``. Caches of 4 bits are not supported.

        Returns:
            ``q``'s shape of ``o_data_type``. With ``return_lse`` also ``[batch_size * q_len_per_req,
            num_qo_heads]`` float32, in base 2.

        Raises:
            ValueError: no plan, or shapes, strides or devices that do not fit it.
            TypeError: dtypes that do not fit it.
        """
        if not (window_left is None and kv_cache_sf is None):
            check_run(f"{self._name}.run", self._window_left, window_left, kv_cache_sf)
        if q_len_per_req is not None:
            check_as_planned(f"{self._name}.run", "q_len_per_req", q_len_per_req, self._q_len_per_req)
        return self._run_paged(q, paged_kv_cache, args, (q_scale, k_scale, v_scale), out, lse, return_lse, sinks)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
        is made if the last one holds all visible keys. If windows differ, plan without one.

        Raises:
            ValueError, TypeError: as :meth:`plan` and :meth:`run`.
            CaptureError: a CUDA graph is being captured, and the options need another plan.
        """
        self._use_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """:class:`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph``.

    Args:
        workspace_buffer, kv_layout, use_tensor_cores: as for the base class.
        indptr_buffer, indices_buffer, last_page_len_buffer: the base class's ``paged_kv_*_buffer``.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


declare(globals())
