"""Prefill of a batch from tables on the device, without a plan: packed, separate and paged keys and values.

Each call schedules its batch on the device, see :mod:`.batch_schedule`. The host reads no tensor of a GPU, so a CUDA
graph serves any lengths up to the bounds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from .._ops.arguments import check_items
from .._ops.dtypes import dtype_of, is_fp8
from .._ops.errors import value_error
from .._ops.numbers import check_option, check_range, finite, positive, whole
from .._ops.shapes import check_tensors
from .._ops.tensors import check_metadata
from ..env import BATCH_INVARIANT
from ..errors import UnsupportedError
from .arguments import CAUSAL, NON_CAUSAL, as_kernel_input, check_sinks, no_gradient
from .batch_schedule import kernels_of, schedule, schedule_layout_of
from .lists import Shape
from .operators import call, number_of_variant
from .plan_free import LENGTHS, QUERIES, as_int32, cache_pair, check_workspace, factor_of, flat_table, store
from .signature import CallArguments, Parameters

LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
MASKS = ("causal", "sliding_window", "chunked", "padding")
E4M3 = torch.float8_e4m3fn
NHD, HND = 0, 1


def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor | tuple[Any, ...],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: torch.Tensor | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float | None = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a batch whose tables are on the device, without a plan.

    The output is ``softmax(bmm1_scale * q . k) @ v * bmm2_scale``. The queries of a request are its last tokens. The
    kernels are the portable ones on every GPU.

    Args:
        qkv: queries, keys and values in ``input_layout``, bfloat16, float16 or float8_e4m3fn; on the CPU also float32.
            Keys and values of 8 bits may have queries of 16 bits. The last dimension is contiguous, other strides are
            free.

            - ``PACKED_QKV``: ``[tokens, 3, num_heads, head_dim]``.
            - ``CONTIGUOUS_Q_KV``: ``(q, kv)``, ``[tokens, num_qo_heads, head_dim]`` and
              ``[kv_tokens, 2, num_kv_heads, head_dim]``.
            - ``SEPARATE_Q_K_V``: ``(q, k, v)``, keys and values ``[kv_tokens, num_kv_heads, head_dim]``.
            - ``Q_PAGED_KV_NHD``, ``Q_PAGED_KV_HND``: ``(q, cache)``, ``[pages, 2, page_size, num_kv_heads, head_dim]``
              or ``[pages, 2, num_kv_heads, page_size, head_dim]``. ``cache`` may be a pair of keys and values.

        input_layout: see ``qkv``.
        workspace_buffer: contiguous bytes for the schedule and partial states, on the device of ``q``. Its content
            before the call has no effect.
        seq_lens: ``[batch_size]`` int32 or uint32, keys of each request. Lengths beyond ``max_kv_len`` count as it.
        max_q_len, max_kv_len: bounds on the queries and keys of a request, on the host.
        bmm1_scale: factor of the logits: a number, or one element of float32 that the host does not read. It
            contains ``1 / sqrt(head_dim)`` and the scales of queries and keys.
        bmm2_scale: factor of the output, as ``bmm1_scale``: the scale of values, divided by the scale of an output of
            8 bits.
        batch_size: number of requests.
        cum_seq_lens_q: ``[batch_size + 1]`` int32, first queries of the requests. The CPU checks both offsets.
        cum_seq_lens_kv: ``[batch_size + 1]`` int32, first keys of the requests. Paged layouts ignore it.
        block_tables: ``[batch_size, max_pages]`` int32, pages of each request; for paged layouts only. For keys and
            values that are views of one allocation also ``[batch_size, 2, max_pages]``: pages of keys, then pages of
            values. Both count from the first page of keys. A page of values is its page of keys plus the distance
            between the views, in pages.
        out: ``[tokens, num_qo_heads, head_dim]``. Allocated by default.
        out_dtype: dtype of the output. For 16-bit queries the dtype of ``q``; for 8-bit queries bfloat16, float16 or
            float8_e4m3fn. By default the dtype of ``out``, or of ``q`` without ``out``.
        sinks: ``[num_qo_heads]`` float32, a logit of each query head that joins the softmax denominator.
        pos_encoding_mode: ``None`` or ``"NONE"``.
        logits_soft_cap_scale: ``cap`` of ``cap * tanh(logits / cap)``; ``None`` or 0: none.
        mask_mode: ``"causal"``; ``"sliding_window"``, which needs ``window_left``; ``"chunked"``: causal within chunks
            of keys; ``"padding"``: no mask. Upper case is accepted.
        window_left: number of keys that a query sees before its own position, in every mode; -1: all.
        chunked_attention_size: keys of a chunk, a power of two; only for ``"chunked"``.
        save_softmax_stats: also return the lse.
        skip_softmax_threshold_scale_factor: accepted and ignored. Results are exact.

    Returns:
        ``out``, or ``(out, lse)``. ``lse`` is the natural logarithm of the softmax denominator, float32
        ``[tokens, num_qo_heads]``, ``-inf`` for a query that sees no key. FlashInfer returns maximum and sum instead.

    Raises:
        UnsupportedError: a position encoding, or a soft cap with ``bmm1_scale`` on a GPU.
        ValueError: shapes, sizes, strides or devices that do not fit, or a workspace that is too small.
        TypeError: dtypes that do not fit.
        GradientError: a tensor requires a gradient.
    """
    op = "trtllm_fmha_v2_prefill"
    layout, q, k, v = _operands(op, qkv, input_layout)
    no_gradient(op, (q, k, v, sinks))
    paged = input_layout.startswith("Q_PAGED")
    shape, out = _shape_and_out(op, q, k, v, layout, paged, out, out_dtype)
    positive(op, "batch_size", batch_size)
    longest, most_keys = positive(op, "max_q_len", max_q_len), positive(op, "max_kv_len", max_kv_len)
    check_tensors(
        op, q=(q, "_ _ _"), seq_lens=(seq_lens, (batch_size,), LENGTHS),
        cum_seq_lens_q=(cum_seq_lens_q, (batch_size + 1,), (torch.int32,)),
    )  # fmt: skip
    mask = _mask_of(op, mask_mode, window_left, chunked_attention_size)
    cap = 0.0 if logits_soft_cap_scale is None else finite(op, "logits_soft_cap_scale", logits_soft_cap_scale)
    if cap < 0:
        raise value_error(op, "logits_soft_cap_scale", cap, "0 or more")
    if pos_encoding_mode not in (None, "NONE"):
        raise UnsupportedError(
            f"{op}: pos_encoding_mode: got {pos_encoding_mode!r}, wanted None: rotate before the call"
        )
    if sinks is not None:
        check_sinks(op, sinks, shape.num_qo_heads, q.device, False)
    scale, sm_scale = factor_of(op, "bmm1_scale", bmm1_scale, q.device)
    o_scale, out_factor = factor_of(op, "bmm2_scale", bmm2_scale, q.device)
    if sm_scale is not None and cap > 0:
        raise UnsupportedError(f"{op}: bmm1_scale: got a tensor on {q.device} with a soft cap, wanted a number")
    check_workspace(op, workspace_buffer, q.device)
    keys = _keys_of(op, k, v, layout, paged, batch_size, seq_lens, cum_seq_lens_kv, block_tables)
    if q.is_cpu:
        _check_queries(op, cum_seq_lens_q, q.shape[0])
    tokens = q.shape[0]
    lse = torch.empty(tokens, shape.num_qo_heads, dtype=torch.float32, device=q.device) if save_softmax_stats else None
    if tokens > 0:
        variant = "" if not mask.chunk else "chunk_mask_soft_cap" if cap > 0 else "chunk_mask"
        kernels = kernels_of(op, shape, longest, variant, q.device, "prefill", cap > 0, BATCH_INVARIANT.get())
        schedule_layout = schedule_layout_of(shape, batch_size, longest, kernels.tile_rows, kernels.workers)
        scheduled = schedule(
            op, workspace_buffer, shape, kernels, schedule_layout, as_int32(seq_lens), cum_seq_lens_q.contiguous(),
            tokens, longest, min(most_keys, keys.most), keys.table_stride, mask.mode, mask.window, sm_scale,
        )  # fmt: skip
        arguments = CallArguments(
            scheduled.kv_indptr if keys.indptr is None else keys.indptr, keys.pages, *scheduled.lists, kv_layout=layout,
            mask_mode=mask.mode, window_left=mask.window, o_scale=o_scale,
            variant=0 if variant else number_of_variant(0, cap > 0),
        )  # fmt: skip
        parameters: tuple[Any, ...] = Parameters(None, scheduled.numbers, None, sinks, scale, cap)
        if variant:
            parameters = (scheduled.numbers, sinks, scale, *((cap,) if cap > 0 else ()), mask.chunk)
        # The conversion is exact: 16-bit types represent all values of e4m3.
        queries = as_kernel_input(q if q.dtype == shape.dtype_q else q.to(shape.dtype_q))
        result = out if out.dtype == shape.dtype_o else torch.empty(out.shape, dtype=shape.dtype_o, device=q.device)
        call(op, kernels.operators.run, queries, k, v, result, lse, *arguments, *parameters)
        store(out, result, out_factor)
    return out if lse is None else (out, lse.mul_(math.log(2)))


def _operands(op: str, qkv: Any, input_layout: str) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layout of keys and values, and the three operands."""
    check_option(op, "input_layout", input_layout, LAYOUTS)
    if input_layout == "PACKED_QKV":
        check_tensors(op, qkv=(qkv, "_ 3 _ _"))
        return NHD, *qkv.unbind(1)
    if input_layout == "SEPARATE_Q_K_V":
        check_items(op, "qkv", qkv, "queries, keys and values", 3)
        return NHD, *qkv
    if input_layout == "CONTIGUOUS_Q_KV":
        check_items(op, "qkv", qkv, "queries, and keys with values", 2)
        check_tensors(op, kv=(qkv[1], "_ 2 _ _"))
        return NHD, qkv[0], *qkv[1].unbind(1)
    check_items(op, "qkv", qkv, "queries and a cache", 2)
    if isinstance(qkv[1], torch.Tensor):
        check_tensors(op, kv_cache=(qkv[1], "_ 2 _ _ _"))
    return HND if input_layout == "Q_PAGED_KV_HND" else NHD, qkv[0], *cache_pair(op, qkv[1])


def _shape_and_out(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int, paged: bool, out: torch.Tensor | None,
    out_dtype: torch.dtype | str | None,
) -> tuple[Shape, torch.Tensor]:  # fmt: skip
    """Check the operands. Return the heads, sizes and dtypes of the kernels, and the output."""
    dims = ("p h n d" if layout else "p n h d") if paged else "n h d"
    dtypes = (*(QUERIES[:2] if isinstance(q, torch.Tensor) and q.is_cuda else QUERIES), E4M3)
    tokens, heads, head_dim, *rest = check_tensors(op, q=(q, "t q d", dtypes), k=(k, dims), v=(v, dims, "k"))
    num_kv_heads = rest[2] if paged and layout == NHD else rest[1]
    if num_kv_heads < 1 or heads % num_kv_heads != 0:
        raise value_error(op, "q", f"{heads} heads", f"a multiple of the {num_kv_heads} of keys")
    if k.dtype != q.dtype and (is_fp8(q.dtype) or not is_fp8(k.dtype)):
        raise TypeError(f"{op}: k: got {k.dtype}, wanted {q.dtype} as q has, or 8 bits with queries of 16 bits")
    wanted = q.dtype
    if out_dtype is not None:
        wanted = dtype_of(op, "out_dtype", out_dtype)
    elif isinstance(out, torch.Tensor):
        wanted = out.dtype
    if (
        wanted != q.dtype
        and not (is_fp8(q.dtype) and wanted in QUERIES[:2])
        and not (is_fp8(k.dtype) and wanted == E4M3)
    ):
        raise TypeError(
            f"{op}: out_dtype: got {wanted}, wanted {q.dtype} as q has; 8-bit q or k also allow other dtypes"
        )
    if out is None:
        out = torch.empty(tokens, heads, head_dim, dtype=wanted, device=q.device)
    check_metadata(op, "out", out, (tokens, heads, head_dim), q.device, wanted)
    computed = q.dtype if not is_fp8(q.dtype) else torch.float16 if wanted == torch.float16 else torch.bfloat16
    return Shape(heads, num_kv_heads, head_dim, head_dim, computed, k.dtype, computed), out


class MaskSettings(NamedTuple):
    """Mask of a call for the operators: mode, window, and the keys of a chunk or 0."""

    mode: int
    window: int
    chunk: int


def _mask_of(op: str, mask_mode: str, window_left: int, chunk: int) -> MaskSettings:
    if not isinstance(mask_mode, str):
        raise TypeError(f"{op}: mask_mode: got {type(mask_mode).__name__}, wanted one of {', '.join(MASKS)}")
    name = mask_mode.lower()
    check_option(op, "mask_mode", name, MASKS)
    window, size = whole(op, "window_left", window_left, -1), whole(op, "chunked_attention_size", chunk, 0)
    if name == "sliding_window" and window < 0:
        raise value_error(op, "window_left", window, "0 or more for sliding_window")
    if name != "chunked":
        if size:
            raise value_error(op, "chunked_attention_size", size, f"0 for {name}")
        return MaskSettings(NON_CAUSAL if name == "padding" else CAUSAL, window, 0)
    if not 0 < size <= 1 << 30 or size & (size - 1):
        raise value_error(op, "chunked_attention_size", size, "a power of two up to 2^30 for chunked")
    return MaskSettings(CAUSAL, size - 1 if window < 0 else min(window, size - 1), size)


class KeyTables(NamedTuple):
    """Tables of the keys: offsets of ragged keys, or pages."""

    indptr: torch.Tensor | None
    pages: torch.Tensor | None
    table_stride: int
    most: int  # of one request


def _keys_of(
    op: str, k: torch.Tensor, v: torch.Tensor, layout: int, paged: bool, batch_size: int, seq_lens: torch.Tensor,
    indptr: torch.Tensor, tables: torch.Tensor | None,
) -> KeyTables:  # fmt: skip
    if not paged:
        if tables is not None:
            raise value_error(op, "block_tables", "a tensor", "None for keys without pages")
        check_tensors(op, k=(k, None), cum_seq_lens_kv=(indptr, (batch_size + 1,), (torch.int32,)))
        if k.is_cpu and batch_size > 0:
            starts = indptr[:-1].long()
            check_range(op, "cum_seq_lens_kv", int(starts.min()), 0)
            check_range(op, "cum_seq_lens_kv", int((starts + seq_lens.view(torch.int32)).max()), 0, k.shape[0])
        return KeyTables(indptr.contiguous(), None, 0, k.shape[0])
    if tables is None:
        raise value_error(op, "block_tables", None, "the pages of each request")
    page_size = k.shape[1 + layout]
    if isinstance(tables, torch.Tensor) and tables.dim() == 3:
        check_tensors(op, k=(k, None), block_tables=(tables, "_ 2 _", (torch.int32,)))
        tables = _key_pages(op, k, v, page_size, seq_lens, tables)
    columns = check_tensors(op, k=(k, None), block_tables=(tables, "b m", (torch.int32,)))[1]
    check_tensors(op, block_tables=(tables, (batch_size, columns)))
    if columns > 1 and tables.stride(1) != 1:
        raise value_error(op, "block_tables", f"stride {tables.stride(1)} of the last dimension", 1)
    pages, stride = flat_table(tables)
    return KeyTables(None, pages, stride, columns * page_size if k.shape[0] else 0)


def _key_pages(
    op: str, k: torch.Tensor, v: torch.Tensor, page_size: int, seq_lens: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    """Return the pages of keys. Kernels compute the pages of values from the distance between the views."""
    if is_compiling():
        return tables[:, 0]
    step, distance = k.stride(0) * k.element_size(), v.data_ptr() - k.data_ptr()
    if k.stride() != v.stride() or step == 0 or distance % step != 0:
        got = f"[batch_size, 2, max_pages] for views with a distance of {distance} bytes and pages of {step} bytes"
        raise value_error(op, "block_tables", got, "views with equal strides and a distance of whole pages")
    if tables.is_cpu:
        used = torch.arange(tables.shape[2], device="cpu")[None, :] * page_size < seq_lens.view(torch.int32)[:, None]
        if bool(((tables[:, 1] - tables[:, 0] != distance // step) & used).any()):
            wanted = f"each page of values equal to its page of keys plus {distance // step}"
            raise value_error(op, "block_tables", "other pages of values", wanted)
    return tables[:, 0]


def _check_queries(op: str, indptr: torch.Tensor, tokens: int) -> None:
    """Check offsets of queries on the CPU."""
    check_range(op, "cum_seq_lens_q", int(indptr.min()), 0)
    check_range(op, "cum_seq_lens_q", int(indptr.max()), 0, tokens)
    if bool((indptr[1:] < indptr[:-1]).any()):
        raise value_error(op, "cum_seq_lens_q", "offsets that decrease", "offsets that never decrease")
