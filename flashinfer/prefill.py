"""Attention of any number of query tokens for each request: over its own keys, or a batch's over ragged or paged ones.

The output is ``softmax(sm_scale * q . k) @ v``, for query head ``h`` over key head ``h // (num_qo_heads / num_kv_heads)``;
lse is the logarithm in base 2 of the sum of ``2^(logit * log2 e)``, as :func:`flashinfer.merge_state` takes it. Where
there is no key to see, the output is 0 and lse -inf. The queries of a request are its last tokens: the last query
stands at the last key, in causal masks, windows and position encodings alike.

Source: Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023; Ye et al.:
FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving, 2025.
"""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import torch

from ._attention.arguments import (
    CAUSAL,
    CUSTOM,
    NON_CAUSAL,
    Logits,
    PagedCache,
    Scale,
    check_dims,
    layout_of,
    logits_of,
    operators_of_module,
)
from ._attention.bound import BoundCalls
from ._attention.kernels import size_class
from ._attention.masks import MultiItem, one_mask
from ._attention.one_request import attend_one, run_one
from ._attention.prefill_wrapper import BatchPrefill
from ._attention.schedule import check_tables
from ._unsupported import trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache
from .jit.modules.prefill import (
    check_kernels,
    gen_batch_prefill_module,
    gen_customize_batch_prefill_module,
    gen_customize_single_prefill_module,
    gen_single_prefill_module,
)
from .prefill_backward import single, wanted

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "gen_batch_prefill_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_single_prefill_module",
    "gen_single_prefill_module",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
]

_CALLS = BoundCalls("prefill", 3)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's queries over its keys and values.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]`` (float16, bfloat16; float32 on the CPU), the last tokens of the request.
        k, v: ``[kv_len, num_kv_heads, head_dim_qk]`` and ``[kv_len, num_kv_heads, head_dim_vo]`` (NHD), or with the first two
            dimensions exchanged (HND); both of one dtype: ``q``'s, float8_e4m3fn or float8_e5m2. ``num_kv_heads`` divides
            ``num_qo_heads``. Strides are free; what kernels cannot read in place is copied.
        scale_q, scale_k, scale_v: what quantised values are to be multiplied by: numbers, or tensors of one element or of
            one per head. A tensor on a GPU is multiplied into the query or the output, and never read on the host.
        o_dtype: of the output, ``q``'s by default.
        custom_mask: ``[qo_len, kv_len]`` bool, True where a query may see a key; ``causal`` then means nothing.
        packed_custom_mask: its bits as :func:`flashinfer.packbits` packs them, little end first; goes before ``custom_mask``.
        causal: a query sees no key behind its own position.
        kv_layout: ``"NHD"`` or ``"HND"``.
        pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` (rotates halves of ``q`` and ``k``) or ``"ALIBI"`` (slope * distance).
        use_fp16_qk_reduction: accepted; products are summed in float32.
        sm_scale: by default ``1 / sqrt(head_dim_qk)``.
        window_left: a query sees this many keys to its left; -1: all.
        logits_soft_cap: logits become ``cap * tanh(logit / cap)`` where this is above 0.
        rope_scale, rope_theta: 1 and 1e4 by default: pair ``i`` turns by ``p / rope_scale * rope_theta^(-2 i / head_dim_qk)``.
        backend: ``"fa2"``, kernels that run everywhere; ``"fa3"``, for Hopper alone; ``"auto"``, for long requests there.
        return_lse: also return the lse.

    Returns:
        ``[qo_len, num_qo_heads, head_dim_vo]`` of ``o_dtype``; with ``return_lse`` also ``[qo_len, num_qo_heads]`` float32.
        Both have gradients for ``q``, ``k`` and ``v``. On the CPU these may be float64, to check gradients in.

    Raises:
        ValueError: shapes, sizes, layouts, devices or modes that do not fit, with those that there are.
        TypeError: dtypes that do not fit.
        GradientError: a gradient is wanted with scales or of float8.
    """
    op, scales = "single_prefill_with_kv_cache", (scale_q, scale_k, scale_v)
    options: tuple[Any, ...] | None = None
    if custom_mask is None and packed_custom_mask is None and o_dtype is None:
        options = (causal, kv_layout, pos_encoding_mode, window_left, logits_soft_cap, rope_scale, rope_theta, backend)
        options = (*options, size_class(q, k, kv_layout))
        result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
        if result is not None:
            return result
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dims(op, name, x, 3)
    check_kernels(backend)
    logits = logits_of(
        op, q.shape[2], pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    packed = one_mask(op, custom_mask, packed_custom_mask, q.shape[0], k.shape[layout_of(op, kv_layout)], q.device)
    mode = CUSTOM if packed is not None else CAUSAL if causal else NON_CAUSAL
    if wanted(q, k, v):
        return single(op, q, k, v, kv_layout, logits, scales, o_dtype, mode, packed, return_lse)
    if options is not None:
        _CALLS.keep(q, k, v, options, layout_of(op, kv_layout), mode, logits, backend)
        result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
        if result is not None:
            return result
    out, lse = attend_one("prefill", op, q, k, v, kv_layout, logits, scales, o_dtype, mode, packed, return_lse, backend)
    return (out, lse) if lse is not None else out


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse.__doc__ = """:func:`single_prefill_with_kv_cache` with ``return_lse=True``."""


def single_prefill_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = NON_CAUSAL,
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`single_prefill_with_kv_cache` by a variant of your own.

    Args:
        jit_module: what ``gen_customize_single_prefill_module(...).build_and_load()`` returned.
        q, k, v, kv_layout, window_left, return_lse: as for :func:`single_prefill_with_kv_cache`.
        args: the variant's additional tensors, then its scalars, in the order in which they were named.
        mask_mode: 0, or 1 for a causal mask; other masks are the variant's.

    Raises:
        ValueError, TypeError: as :func:`single_prefill_with_kv_cache`; arguments that are not those of the variant.
    """
    op = "single_prefill_with_kv_cache_with_jit_module"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dims(op, name, x, 3)
    if mask_mode not in (NON_CAUSAL, CAUSAL):
        raise ValueError(f"{op}: mask_mode: got {mask_mode}, wanted 0 or 1: other masks are the variant's")
    operators = operators_of_module(op, jit_module)
    logits = Logits(0, int(window_left), 0.0, 1.0, 1.0, 1e4)
    out, lse = run_one(op, operators, q, k, v, layout_of(op, kv_layout), logits, args, int(mask_mode), return_lse)
    return (out, lse) if lse is not None else out


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
        backend: as for :func:`single_prefill_with_kv_cache`; chosen by each plan.
        jit_args: the arguments of :func:`gen_customize_batch_prefill_module` less ``backend`` and ``device``: a variant of
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
    ) -> None:
        """Balance the work of a batch; to be called whenever lengths change.

        Args:
            qo_indptr: ``[batch_size + 1]`` int32, where each request's queries begin in ``q``. On the CPU nothing is waited
                for; tables of a GPU are read back once, all in one copy.
            paged_kv_indptr: ``[batch_size + 1]`` int32, where each request's pages begin in ``paged_kv_indices``.
            paged_kv_indices: ``[paged_kv_indptr[-1]]`` int32 or longer, the pages; requests may share some.
            paged_kv_last_page_len: ``[batch_size]`` int32, entries of each request's last page, 1 to ``page_size``. A request
                without pages has no keys, and its entry here means nothing.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: of what will be run; ``head_dim_vo`` is
                ``head_dim_qk`` by default.
            custom_mask: bool, the masks ``[qo_len, kv_len]`` of all requests, flattened, one behind the other.
            packed_custom_mask: their bits, each request's padded to whole bytes, as :func:`flashinfer.segment_packbits`
                packs them with ``bitorder="little"``; goes before ``custom_mask``, and both before ``causal``.
            causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta:
                as for :func:`single_prefill_with_kv_cache`. With ``jit_args`` the variant's parameters stand for most of
                them: ``sm_scale`` is not used, a mode or a cap is an error.
            q_data_type, kv_data_type: of what will be run; ``kv_data_type`` is ``q_data_type`` by default.
            non_blocking: whether tables in pinned memory are copied without waiting: they must then stay as they are until
                the copies are done. All others may change once this returns.
            prefix_len_ptr: ``[batch_size]`` uint32: multi-item scoring: the keys of a request are a prefix of this length and
                then items, each of which sees the prefix and itself.
            token_pos_in_items_ptr: ``[batch_size * token_pos_in_items_len]`` uint16: for each key behind the prefix, how far
                it is from the delimiter before its item, 0 at a delimiter.
            token_pos_in_items_len: entries of each request there; unused ones are 0.
            max_item_len_ptr: ``[batch_size]`` uint16, the longest item of each request.

        Raises:
            ValueError: tables, masks, sizes or modes that do not fit, a buffer that is too small (which, wanted, got), or a
                plan beyond what a CUDA graph was captured with.
            TypeError: dtypes that do not fit.

        Under CUDA graphs the first plan fixes what later ones must fit into. Scales, windows, modes and dtypes are captured
        as they are; what a replay follows are the tables.
        """
        op = f"{self._name}.plan"
        shape = self._shape(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type)
        logits = logits_of(
            op, head_dim_qk, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        given = {
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        check_tables(op, qo_indptr=qo_indptr, **given)
        items = MultiItem(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        self._plan_paged(
            qo_indptr,
            given,
            page_size,
            shape,
            logits,
            bool(causal),
            custom_mask,
            packed_custom_mask,
            items,
            non_blocking,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; under CUDA graphs it may be longer.
            paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a ``(k_cache, v_cache)`` pair without the
                dimension of 2. Strides are free but for the last dimension, which is contiguous; on CUDA rows start at
                multiples of 16 bytes. What lies in places that no request owns has no influence, whatever it is.
            args: with ``jit_args``, the variant's additional tensors, then its scalars.
            k_scale, v_scale: as ``scale_k`` and ``scale_v`` of :func:`single_prefill_with_kv_cache`.
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]``, to be written; made by default.
            lse: ``[qo_indptr[-1], num_qo_heads]`` float32, contiguous, to be written where it is given.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted.

        Raises:
            ValueError: no plan, or shapes, strides or devices other than those planned for.
            TypeError: dtypes other than those planned for.
        """
        return self._run_paged(q, paged_kv_cache, args, (None, k_scale, v_scale), out, lse, return_lse)

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
        """Deprecated: :meth:`run` with options that take the place of those of :meth:`plan`."""
        self._options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Attention of a batch of requests over keys and values that lie one request behind the other.

    ``plan()`` once for each set of lengths, then ``run()`` as often as there are layers.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, custom_mask_buf, mask_indptr_buf, backend, jit_args:
            as for :class:`BatchPrefillWithPagedKVCacheWrapper`.
        kv_indptr_buf: ``[batch_size + 1]`` int32.

    Raises:
        ValueError, TypeError: buffers, a layout or a backend that do not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._prefill_buffers(qo_indptr_buf, custom_mask_buf, mask_indptr_buf)
        self._kv_indptr_buf = self._graph_buffer("kv_indptr_buf", kv_indptr_buf)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> None:
        """Balance the work of a batch; to be called whenever lengths change.

        Args:
            kv_indptr: ``[batch_size + 1]`` int32, where each request's keys begin in ``k`` and ``v``.
            qo_indptr, num_qo_heads, ...: all others as for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError, TypeError: as there.
        """
        op = f"{self._name}.plan"
        shape = self._shape(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type)
        logits = logits_of(
            op, head_dim_qk, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        check_tables(op, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        items = MultiItem(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        self._plan_ragged(
            qo_indptr, kv_indptr, self._kv_indptr_buf, shape, logits, bool(causal), custom_mask, packed_custom_mask,
            items, non_blocking,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; under CUDA graphs it may be longer.
            k, v: ``[kv_indptr[-1], num_kv_heads, head_dim_qk]`` and ``[kv_indptr[-1], num_kv_heads, head_dim_vo]`` (NHD), or
                with the first two dimensions exchanged (HND); they may be longer. Strides are free; what kernels cannot
                read in place is copied.
            args, out, lse, return_lse, enable_pdl: as for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises:
            ValueError, TypeError: as there. The result has gradients for ``q``, ``k`` and ``v``.
        """
        return self._run_ragged(q, k, v, args, out, lse, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: :meth:`run` with options that take the place of those of :meth:`plan`."""
        self._options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
