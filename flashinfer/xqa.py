"""Decode without a plan: page tables and lengths are tensors on the device, and the host reads none of them.

Each call schedules its batch on the device, see ``include/flashinfer/attention/batch_schedule.h``. One CUDA graph
therefore serves any lengths up to ``max_seq_len``. Results are those of
:class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper`, whose kernels read the schedule.
"""

from __future__ import annotations

import math

import torch

from ._attention.arguments import PagedCache
from ._attention.plan_free import Queries, Scales, attend, cache_pair
from ._ops.arguments import check_none
from ._ops.dtypes import dtype_of
from ._ops.errors import value_error
from ._ops.numbers import check_option, positive_real, whole
from ._ops.tensors import check_dims, check_tensor
from .errors import UnsupportedError

__all__ = ["trtllm_batch_decode_with_kv_cache", "xqa", "xqa_batch_decode_with_kv_cache"]

_FP4 = "caches of 4 bits are not supported"


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: PagedCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: object = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of the last tokens of each request over a paged cache, without a plan.

    The output is ``softmax(bmm1_scale * q . k) @ v * bmm2_scale``.

    Args:
        query: ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, the queries of a request together. bfloat16
            or float16; on the CPU also float32.
        kv_cache: ``(k_cache, v_cache)``, each ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or
            ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND). Or one tensor with a second dimension of 2, or
            of 1 if keys are also the values. ``query``'s dtype, float8_e4m3fn or float8_e5m2. The last dimension
            is contiguous, other strides are free. On CUDA rows start at multiples of 16 bytes.
        workspace_buffer: contiguous bytes for the schedule and partial states, on ``query``'s device. Calls on one
            stream may share it. Its content before the call has no effect.
        block_tables: ``[batch_size, max_pages]`` int32, pages of each request. Entries after its last page have no
            effect. Rows may be strided.
        seq_lens: ``[batch_size]`` int32 or uint32, keys of each request, those of its queries included. Lengths
            beyond ``max_seq_len`` or the page table count as that bound.
        max_seq_len: bound on lengths, on the host.
        bmm1_scale: factor of the logits: a number, or one element of float32 that the host does not read. It
            contains ``1 / sqrt(head_dim)`` and the scales of queries and keys.
        bmm2_scale: factor of the output, as ``bmm1_scale``: the scale of values, divided by the scale of an output of
            8 bits.
        window_left: keys to the left of its own that a query sees; -1: all.
        out: ``query``'s shape and dtype, or float8_e4m3fn for caches of 8 bits. Allocated by default.
        sinks: ``[num_qo_heads]`` float32, a logit of each query head that joins the softmax denominator.
        kv_layout: ``"NHD"`` or ``"HND"``.
        enable_pdl: accepted and ignored.
        q_len_per_req: queries of each request. With ``q_cu_seq_lens``, the most queries of a request.
        o_scale: scale of an output of 8 bits. Accepted and ignored, because ``bmm2_scale`` contains it.
        mask: bits of the pairs of a request's queries, ``[batch_size, q_len_per_req, words]`` uint16, contiguous,
            with ``words = 2 * ceil(q_len_per_req / 32)``. With ``q_cu_seq_lens``: ``[tokens, words]``. Bit ``i`` of a
            row, counted from the lowest of its first word: the query sees the key of query ``i``. All earlier keys
            of the window are visible. By default the mask is causal.
        kv_cache_sf: ``None``. Caches of 4 bits are not supported.
        q_cu_seq_lens: ``[batch_size + 1]`` int32, the first query of each request, if they have different numbers
            of them. A request may have none.

    Returns:
        ``out``, or a new tensor of ``query``'s shape and dtype.

    Raises:
        UnsupportedError: a cache of 4 bits.
        ValueError: shapes, sizes, strides or devices that do not fit, or a workspace that is too small.
        TypeError: dtypes that do not fit.
        GradientError: a tensor requires a gradient.
    """
    op = "xqa_batch_decode_with_kv_cache"
    if kv_cache_sf is not None:
        raise UnsupportedError(f"{op}: kv_cache_sf: got scales, wanted None: {_FP4}")
    if q_len_per_req is None:
        raise value_error(op, "q_len_per_req", None, "the queries of each request")
    return attend(
        op, query, cache_pair(op, kv_cache), kv_layout, block_tables, seq_lens, max_seq_len,
        Queries(whole(op, "q_len_per_req", q_len_per_req), q_cu_seq_lens, mask),
        Scales(bmm1_scale, bmm2_scale), window_left, sinks, out, workspace_buffer,
    )  # fmt: skip


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: PagedCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: object = None,
    *,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    uses_shared_paged_kv_idx: bool = True,
    bmm1_scale_log2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`xqa_batch_decode_with_kv_cache`, with the arguments of another FlashInfer function.

    Args:
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale: as there.
        window_left, out, sinks, enable_pdl, o_scale, mask, kv_cache_sf: as there.
        out_dtype: dtype of the output. ``None``: that of ``out``, or of ``query``.
        o_sf_scale, o_sf_vec_size: ``None``. Outputs of 4 bits are not supported.
        kv_layout: ``"HND"`` or ``"NHD"``.
        backend: ``"auto"`` or ``"xqa"``.
        q_len_per_req: queries of each request, or ``None`` with ``max_q_len`` and ``cum_seq_lens_q``.
        max_q_len: the most queries of a request.
        cum_seq_lens_q: ``[batch_size + 1]`` int32, the first query of each request.
        skip_softmax_threshold_scale_factor, multi_ctas_kv_counter_buffer: accepted and ignored. Results are exact.
        lse, return_lse: ``None`` and ``False``. The lse is not computed.
        uses_shared_paged_kv_idx: ``True``. Keys and values have one page table.
        bmm1_scale_log2: ``None``. ``bmm1_scale`` may be a tensor.

    Returns:
        ``out``, or a new tensor of ``query``'s shape and ``out_dtype``.

    Raises:
        UnsupportedError: an lse, a cache of 4 bits, page tables of their own for keys and values, or a scale in base 2.
        ValueError, TypeError, GradientError: as there.
    """
    op = "trtllm_batch_decode_with_kv_cache"
    check_option(op, "backend", backend, ("auto", "xqa"))
    for name, value in (("o_sf_scale", o_sf_scale), ("o_sf_vec_size", o_sf_vec_size)):
        check_none(op, name, value, "outputs of 4 bits are not supported")
    if lse is not None or return_lse:
        raise UnsupportedError(f"{op}: return_lse: got True or an lse, wanted False: plan-free decode computes none")
    if not uses_shared_paged_kv_idx:
        raise UnsupportedError(f"{op}: uses_shared_paged_kv_idx: got False, wanted True: keys and values share a table")
    if bmm1_scale_log2 is not None:
        raise UnsupportedError(f"{op}: bmm1_scale_log2: got a tensor, wanted None: pass bmm1_scale as a tensor")
    if kv_cache_sf is not None:
        raise UnsupportedError(f"{op}: kv_cache_sf: got scales, wanted None: {_FP4}")
    check_tensor(op, "query", query)
    if cum_seq_lens_q is not None:
        q_len_per_req = max_q_len if q_len_per_req is None or max_q_len is not None else q_len_per_req
    if q_len_per_req is None:
        raise value_error(op, "q_len_per_req", None, "a number, or max_q_len and cum_seq_lens_q")
    if out_dtype is not None:
        wanted = dtype_of(op, "out_dtype", out_dtype)
        if out is None:
            out = torch.empty(query.shape, dtype=wanted, device=query.device)
        elif out.dtype != wanted:
            raise value_error(op, "out_dtype", wanted, f"{out.dtype} as out has")
    return attend(
        op, query, cache_pair(op, kv_cache), kv_layout, block_tables, seq_lens, max_seq_len,
        Queries(whole(op, "q_len_per_req", q_len_per_req), cum_seq_lens_q, mask),
        Scales(bmm1_scale, bmm2_scale), window_left, sinks, out, workspace_buffer,
    )  # fmt: skip


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor | None,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    """Compute :func:`xqa_batch_decode_with_kv_cache` into ``output``, with one scale of keys and values.

    Logits are ``q_scale * kv_scale / sqrt(head_dim) * q . k``, and the output is multiplied by ``kv_scale``.

    Args:
        q: ``[batch_size, 1, num_qo_heads, head_dim]``, or ``[batch_size, 1, q_seq_len, num_qo_heads, head_dim]``.
            With ``q_cu_seq_lens``: ``[tokens, num_qo_heads, head_dim]``.
        k_cache, v_cache: as the pair ``kv_cache`` there.
        page_table: ``block_tables`` there.
        seq_lens: ``[batch_size, 1]`` int32 or uint32.
        output: ``q``'s shape. Its dtype is as for ``out`` there.
        workspace_buffer, kv_layout, enable_pdl, mask, q_cu_seq_lens: as there.
        semaphores, sm_count: accepted and ignored.
        num_kv_heads, page_size: sizes of the caches.
        sinks: ``[num_kv_heads, num_qo_heads / num_kv_heads]`` float32.
        sliding_win_size: keys that a query sees, its own included; 0: all.
        rcp_out_scale: one more factor of the output: the reciprocal scale of an output of 8 bits.
        q_seq_len: queries of each request, or the most of one.
        k_sf_cache, v_sf_cache: ``None``. Caches of 4 bits are not supported.

    Raises:
        UnsupportedError: a cache of 4 bits.
        ValueError, TypeError, GradientError: as there.
    """
    op = "xqa"
    for name, scales in (("k_sf_cache", k_sf_cache), ("v_sf_cache", v_sf_cache)):
        if scales is not None:
            raise UnsupportedError(f"{op}: {name}: got scales, wanted None: {_FP4}")
    check_tensor(op, "q", q)
    check_tensor(op, "output", output)
    check_dims(op, "k_cache", k_cache, 4)
    check_dims(op, "page_table", page_table, 2)
    check_tensor(op, "seq_lens", seq_lens)
    if output.shape != q.shape:
        raise value_error(op, "output", f"shape {list(output.shape)}", f"{list(q.shape)} as q has")
    sizes = (k_cache.shape[2], k_cache.shape[1]) if kv_layout == "NHD" else (k_cache.shape[1], k_cache.shape[2])
    for name, got, wanted in (("num_kv_heads", num_kv_heads, sizes[0]), ("page_size", page_size, sizes[1])):
        if got != wanted:
            raise value_error(op, name, got, f"{wanted} as k_cache has")
    window = whole(op, "sliding_win_size", sliding_win_size, 0) - 1
    factor = q_scale * kv_scale / math.sqrt(max(q.shape[-1], 1))
    if not output.is_contiguous():
        raise value_error(op, "output", f"strides {output.stride()}", "a contiguous tensor")
    attend(
        op, q.reshape(-1, *q.shape[-2:]), (k_cache, v_cache), kv_layout, page_table, seq_lens.reshape(-1),
        max(page_table.shape[1] * page_size, 1), Queries(whole(op, "q_seq_len", q_seq_len), q_cu_seq_lens, mask),
        Scales(factor, kv_scale * positive_real(op, "rcp_out_scale", rcp_out_scale)), window,
        None if sinks is None else sinks.reshape(-1), output.view(-1, *output.shape[-2:]), workspace_buffer,
    )  # fmt: skip
