"""Attention of the newest tokens of requests over a paged cache, without a plan.

The page table and the lengths are tensors on the device. Each call schedules its batch there, so the host reads no
tensor, and one CUDA graph serves any lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from .._ops.dtypes import is_fp8
from .._ops.errors import value_error
from .._ops.numbers import check_range, finite, positive, whole
from .._ops.shapes import check_tensors
from .._ops.tensors import check_device, check_metadata, check_tensor
from ..env import BATCH_INVARIANT
from .arguments import CAUSAL, NON_CAUSAL, PagedCache, as_kernel_input, check_sinks, layout_of, no_gradient
from .batch_schedule import Kernels, ScheduleLayout, kernels_of, schedule, schedule_layout_of
from .lists import Shape
from .operators import call
from .signature import CallArguments, Parameters

QUERIES = (torch.bfloat16, torch.float16, torch.float32)  # the last on the CPU only
LENGTHS = (torch.int32, torch.uint32)


class Scales(NamedTuple):
    """Factors of the logits and of the output: numbers, or tensors of one element."""

    logits: float | torch.Tensor
    out: float | torch.Tensor


class Queries(NamedTuple):
    """Queries of each request, which are its last tokens."""

    longest: int  # of one request
    indptr: torch.Tensor | None = None  # [batch_size + 1] int32; None: each request has `longest` queries
    mask: torch.Tensor | None = None  # one bit for each pair of queries, see draft_mask.h; None: causal


def cache_pair(op: str, kv_cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a cache, which is a pair or one tensor.

    In a tensor ``[pages, 1, ...]``, the keys are also the values.
    """
    if isinstance(kv_cache, torch.Tensor):
        check_tensors(op, kv_cache=(kv_cache, "_ _ _ _ _"))
        if kv_cache.shape[1] not in (1, 2):
            raise value_error(op, "kv_cache", f"shape {list(kv_cache.shape)}", "[pages, 1 or 2, ...]")
        return kv_cache[:, 0], kv_cache[:, -1]
    if not (isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2):
        raise value_error(
            op, "kv_cache", type(kv_cache).__name__, "a tensor of 5 dimensions, or a pair of keys and values"
        )
    return kv_cache[0], kv_cache[1]


def attend(
    op: str,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    kv_layout: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    queries: Queries,
    scales: Scales,
    window_left: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor,
) -> torch.Tensor:
    """Return the output of :func:`flashinfer.decode.xqa_batch_decode_with_kv_cache`, which describes the arguments."""
    k, v = cache
    known = _prepare(op, query, k, v, kv_layout, block_tables, seq_lens, queries)
    positive(op, "max_seq_len", max_seq_len)
    window, tokens = whole(op, "window_left", window_left), query.shape[0]
    shape, kernels, schedule_layout = known.shape, known.kernels, known.schedule_layout
    if queries.mask is not None:
        _check_mask(op, queries.mask, tokens, queries.longest, query.device)
    no_gradient(op, (query, k, v, sinks))
    if sinks is not None:
        check_sinks(op, sinks, shape.num_qo_heads, query.device, False)
    scale, sm_scale = factor_of(op, "bmm1_scale", scales.logits, query.device)
    o_scale, out_factor = factor_of(op, "bmm2_scale", scales.out, query.device)
    check_workspace(op, workspace, query.device)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    fp8_dtypes = (torch.float8_e4m3fn,) if is_fp8(k.dtype) else ()
    check_metadata(op, "out", out, query.shape, query.device, query.dtype, *fp8_dtypes)
    if kernels is None or schedule_layout is None:
        return out
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device) if is_fp8(out.dtype) else out
    pages, stride = flat_table(block_tables)
    mask_mode = NON_CAUSAL if queries.longest == 1 or queries.mask is not None else CAUSAL
    scheduled = schedule(
        op, workspace, shape, kernels, schedule_layout, as_int32(seq_lens), queries.indptr, tokens, queries.longest,
        min(max_seq_len, known.most_keys), stride, mask_mode, window, sm_scale,
    )  # fmt: skip
    arguments = CallArguments(
        scheduled.kv_indptr, pages, *scheduled.lists, kv_layout=known.layout, mask_mode=mask_mode, window_left=window,
        o_scale=o_scale,
    )  # fmt: skip
    parameters: tuple[Any, ...] = Parameters(maybe_numbers=scheduled.numbers, maybe_sinks=sinks, sm_scale=scale)
    if queries.mask is not None:
        parameters = (scheduled.numbers, sinks, queries.mask, queries.indptr, scale, queries.mask.shape[-1])
    call(op, kernels.operators.run, as_kernel_input(query), k, v, result, None, *arguments, *parameters)
    store(out, result, out_factor)
    return out


def store(out: torch.Tensor, result: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Write the kernels' result, times a factor on the device, to ``out``. Values of 8 bits saturate."""
    if factor is not None:
        result = result * factor  # float32
    if result is not out:
        most = torch.finfo(out.dtype).max
        out.copy_(result.clamp(-most, most) if is_fp8(out.dtype) else result)


class Prepared(NamedTuple):
    """Properties of all calls with the same shapes and dtypes."""

    layout: int
    shape: Shape
    most_keys: int  # entries of a request's pages
    kernels: Kernels | None  # None: no query
    schedule_layout: ScheduleLayout | None


_known: dict[tuple[Any, ...], Prepared] = {}
_MOST_KNOWN = 1024


def _prepare(
    op: str, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, queries: Queries,
) -> Prepared:  # fmt: skip
    """Return the properties of a call. Shapes and dtypes are checked once; operators check devices in every call."""
    if is_compiling():
        return _checked(op, query, k, v, kv_layout, block_tables, seq_lens, queries)
    try:
        starts = None if queries.indptr is None else (queries.indptr.shape, queries.indptr.dtype)
        key = (
            kv_layout, query.shape, query.dtype, query.device, k.shape, k.dtype, v.shape, v.dtype, block_tables.shape,
            block_tables.stride(), block_tables.dtype, seq_lens.shape, seq_lens.dtype, queries.longest, starts,
            queries.mask is None, BATCH_INVARIANT.get(),
        )  # fmt: skip
        known = _known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # arguments that the checks refuse
        return _checked(op, query, k, v, kv_layout, block_tables, seq_lens, queries)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = _checked(op, query, k, v, kv_layout, block_tables, seq_lens, queries)
    return known


def _checked(
    op: str, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, queries: Queries,
) -> Prepared:  # fmt: skip
    layout = layout_of(op, kv_layout)
    dims = "p h n d" if layout else "p n h d"
    dtypes = QUERIES[:2] if isinstance(query, torch.Tensor) and query.is_cuda else QUERIES
    batch_size, columns, tokens, num_qo_heads, head_dim, *rest = check_tensors(
        op, block_tables=(block_tables, "b m", (torch.int32,)), seq_lens=(seq_lens, "b", LENGTHS),
        query=(query, "t q d", dtypes), k_cache=(k, dims), v_cache=(v, dims, "k_cache"),
    )  # fmt: skip
    num_pages, heads, page_size = rest if layout else (rest[0], rest[2], rest[1])
    if heads < 1 or num_qo_heads % heads != 0:
        raise value_error(op, "query", f"{num_qo_heads} heads", f"a multiple of the cache's {heads}")
    if k.dtype != query.dtype and not is_fp8(k.dtype):
        raise TypeError(f"{op}: k_cache: got {k.dtype}, wanted {query.dtype} as query has, or 8 bits")
    longest = positive(op, "q_len_per_req", queries.longest)
    if queries.indptr is None:
        check_range(op, "query", tokens, batch_size * longest, batch_size * longest, unit="queries")
    else:
        check_tensors(op, block_tables=(block_tables, "b _"), q_cu_seq_lens=(queries.indptr, "b+1", (torch.int32,)))
    if block_tables.numel() > 0 and block_tables.stride(1) != 1 and columns > 1:
        raise value_error(op, "block_tables", f"stride {block_tables.stride(1)} of the last dimension", 1)
    shape = Shape(num_qo_heads, heads, head_dim, head_dim, query.dtype, k.dtype, query.dtype)
    kernels = schedule_layout = None
    if query.numel() > 0:
        mask, invariant = "" if queries.mask is None else "draft_mask", BATCH_INVARIANT.get()
        # With ragged queries, a batch may also have longer requests. An invariant call must use the same kernels.
        family = "decode" if longest == 1 and not (invariant and queries.indptr is not None) else "prefill"
        kernels = kernels_of(op, shape, longest, mask, query.device, family, invariant=invariant)
        schedule_layout = schedule_layout_of(shape, batch_size, longest, kernels.tile_rows, kernels.workers)
    return Prepared(layout, shape, columns * page_size if num_pages else 0, kernels, schedule_layout)


def _check_mask(op: str, mask: torch.Tensor, tokens: int, longest: int, device: torch.device) -> None:
    check_tensor(op, "mask", mask)
    words = 2 * -(-longest // 32)
    if mask.dtype != torch.uint16:
        raise TypeError(f"{op}: mask: got {mask.dtype}, wanted torch.uint16")
    if mask.dim() < 2 or mask.shape[-1] != words or mask.numel() != tokens * words:
        wanted = f"{words} words for each of {tokens} queries"
        raise value_error(op, "mask", f"shape {list(mask.shape)}", wanted)
    check_device(op, "mask", mask, device, " as query is")
    if not mask.is_contiguous():
        raise value_error(op, "mask", f"strides {mask.stride()}", "a contiguous tensor")


def check_workspace(op: str, workspace: torch.Tensor, device: torch.device) -> None:
    """Check that ``workspace_buffer`` is contiguous and on ``device``."""
    check_tensor(op, "workspace_buffer", workspace)
    if not workspace.is_contiguous() or workspace.device != device:
        raise value_error(op, "workspace_buffer", f"a tensor on {workspace.device}", f"contiguous bytes on {device}")


def factor_of(
    op: str, name: str, scale: float | torch.Tensor, device: torch.device
) -> tuple[float, torch.Tensor | None]:
    """Return a number and ``None``, or 1 and the scale as a tensor. The host does not read a tensor of a GPU."""
    if not isinstance(scale, torch.Tensor):
        return finite(op, name, scale), None
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise value_error(op, name, f"{scale.dtype} of shape {list(scale.shape)}", "a number or one element of float32")
    if scale.is_cpu:
        return finite(op, name, float(scale)), None
    if scale.device != device:
        raise value_error(op, name, f"a tensor on {scale.device}", f"one on {device} as query is")
    return 1.0, scale.reshape(1)


def as_int32(lens: torch.Tensor) -> torch.Tensor:
    """Return lengths of int32 or uint32 as contiguous int32."""
    return (lens if lens.dtype == torch.int32 else lens.view(torch.int32)).contiguous()


def flat_table(tables: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the page table as a vector, and the stride of its rows in elements."""
    (rows, columns), stride = tables.shape, tables.stride(0)
    if rows < 2 or stride == columns:
        return tables.reshape(-1), columns
    if columns == 0 or stride < columns:
        return tables.contiguous().view(-1), columns
    return tables.as_strided(((rows - 1) * stride + columns,), (1,)), stride
