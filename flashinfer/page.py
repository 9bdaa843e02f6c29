"""Paged key-value caches: writes of new tokens, and the indices of their slots.

Indices may have any integer dtype and any stride. Kernels read contiguous int32; everything else is copied to
that form. On the CPU an index outside the cache is a ``ValueError`` before any write. On CUDA the host reads
no tensor and raises nothing. Kernels skip a token whose request, position or page does not exist, and write
nothing outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.arguments import check_items
from ._ops.declare import define, define_in_python
from ._ops.errors import check_one_device
from ._ops.indices import check_each, index_table, with_indices
from ._ops.numbers import check_option, whole
from ._ops.route import without_gradient
from ._ops.scalars import is_symbolic
from ._ops.shapes import check_tensors
from ._ops.sizes import differs
from ._ops.tensors import check_tensor
from .jit.modules.page import gen_page_module

INT32_MAX = 2**31 - 1
__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "block_sparse_indices_to_vector_sparse_offsets",
    "gen_page_module",
    "get_batch_indices_positions",
    "get_seq_lens",
]


def _positions_like(append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int) -> tuple[torch.Tensor, torch.Tensor]:
    return append_indptr.new_empty((nnz,)), append_indptr.new_empty((nnz,))


def _like_last_page_len(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    return torch.empty_like(kv_last_page_len)


_APPEND_INDICES = {2: "batch_indices", 3: "positions", 6: "kv_indices", 7: "kv_indptr", 8: "kv_last_page_len"}
_append_paged_kv_cache = with_indices(
    "append_paged_kv_cache",
    define(
        "append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions,"
        " Tensor(a!) paged_kv_cache, Tensor(b!)? paged_v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len,"
        " bool heads_first) -> ()",
        gen_page_module,
        fallback=without_gradient("append_paged_kv_cache", "append_key", "append_value", "paged_kv_cache"),
    ),
    _APPEND_INDICES,
)
_append_paged_mla_kv_cache = with_indices(
    "append_paged_mla_kv_cache",
    define(
        "append_paged_mla_kv_cache(Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions,"
        " Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len) -> ()",
        gen_page_module,
        fallback=without_gradient("append_paged_mla_kv_cache", "append_ckv", "append_kpe", "ckv_cache", "kpe_cache"),
    ),
    _APPEND_INDICES,
)
_get_batch_indices_positions = with_indices(
    "get_batch_indices_positions",
    define(
        "get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, SymInt nnz) -> (Tensor, Tensor)",
        gen_page_module,
        _positions_like,
    ),
    {0: "append_indptr", 1: "seq_lens"},
)
_get_batch_indices_positions_out = with_indices(
    "get_batch_indices_positions",
    define(
        "get_batch_indices_positions_out(Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices,"
        " Tensor(b!) positions) -> ()",
        gen_page_module,
    ),
    {0: "append_indptr", 1: "seq_lens"},
)


def _seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    full = kv_indptr.diff().to(torch.int64).sub_(1).clamp_(min=0)
    lens = full.mul_(page_size).add_(kv_last_page_len)
    if lens.device.type == "cpu" and lens.numel() and int(lens.max()) > INT32_MAX:
        check_each("get_seq_lens", "the length from kv_indptr", lens, 0, INT32_MAX)
    return lens.to(torch.int32)


# An operator in Python, because a compiled module is not worth four instructions.
_get_seq_lens = define_in_python(
    "get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, SymInt page_size) -> Tensor",
    _seq_lens,
    _like_last_page_len,
)
_block_sparse_offsets = with_indices(
    "block_sparse_indices_to_vector_sparse_offsets",
    define(
        "block_sparse_indices_to_vector_sparse_offsets(Tensor block_sparse_indices, Tensor block_sparse_indptr,"
        " Tensor(a!) vector_sparse_offsets, Tensor vector_sparse_indptr, Tensor kv_lens, SymInt stride_block, SymInt stride_n, SymInt block_size) -> ()",
        gen_page_module,
    ),
    {0: "block_sparse_indices", 1: "block_sparse_indptr", 3: "vector_sparse_indptr", 4: "kv_lens"},
)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values of new tokens into a paged cache.

    Token ``t`` of request ``b = batch_indices[t]`` is written to slot ``positions[t] % page_size`` of page
    ``kv_indices[kv_indptr[b] + positions[t] // page_size]``.

    Args:
        append_key, append_value: ``[nnz, num_kv_heads, head_dim]``, float32, float16, bfloat16, int32 or any
            dtype of one byte. Bits are copied unchanged. The last dimension is contiguous; other strides are
            free.
        batch_indices, positions: ``[nnz]`` integers, see :func:`get_batch_indices_positions`. A token with -1
            and -1 is skipped.
        paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
            ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), of the dtype of ``append_key``.
            Or a ``(k_cache, v_cache)`` tuple of tensors without the dimension of 2, whose head_dims may
            differ. The last dimension is contiguous; other strides are free. Written in place.
        kv_indices: ``[num_pages]`` integers, the pages of all requests.
        kv_indptr: ``[batch_size + 1]`` integers, the first page of each request in ``kv_indices``. It may be
            a slice of a longer table.
        kv_last_page_len: ``[batch_size]`` integers, tokens of each request's last page. The values are not
            read.
        kv_layout: ``"NHD"`` or ``"HND"``.

    Raises:
        ValueError: shapes, strides, devices or a layout that do not fit, or arguments that overlap. On the
            CPU also a token whose request, position or page does not exist. On CUDA such a token is skipped.
        TypeError: dtypes that do not fit.

    If two tokens have the same slot, it holds either of them.
    """
    op = "append_paged_kv_cache"
    if kv_layout != "NHD":  # a check costs 0.1 us in each call, as each of the next two
        check_option(op, "kv_layout", kv_layout, ("NHD", "HND"))
    k_cache: Any = paged_kv_cache
    v_cache = None
    if isinstance(paged_kv_cache, tuple | list):
        if len(paged_kv_cache) != 2:
            check_items(op, "paged_kv_cache", paged_kv_cache, "keys and values", 2)
        k_cache, v_cache = paged_kv_cache
        if v_cache is None:  # the operator would take the first for a cache of keys and values
            check_tensor(op, "paged_kv_cache[1]", v_cache)
    _append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout == "HND",
    )


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write compressed KV and rotary keys of new tokens into the two paged caches of MLA.

    Args:
        append_ckv, append_kpe: ``[nnz, head_dim_ckv]`` and ``[nnz, head_dim_kpe]``, usually 512 and 64 wide,
            of the dtypes that :func:`append_paged_kv_cache` supports.
        ckv_cache, kpe_cache: ``[max_num_pages, page_size, head_dim_ckv]`` and ``[max_num_pages, page_size,
            head_dim_kpe]``, same dtype. Written in place.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as for
            :func:`append_paged_kv_cache`.

    Raises:
        ValueError, TypeError: as :func:`append_paged_kv_cache`.

    Slots and strides are those of :func:`append_paged_kv_cache`.

    Source: DeepSeek-AI: DeepSeek-V2, 2024, section 2.1.
    """
    _append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
    )


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each appended token.

    The tokens appended to request ``i`` have the last of its ``seq_lens[i]`` positions.

    Args:
        append_indptr: ``[batch_size + 1]`` integers, the first appended token of each request. It may be a
            slice of a longer table. Tokens before its first offset belong to no request and get -1 and -1.
        seq_lens: ``[batch_size]`` integers, lengths of the requests with the new tokens, see
            :func:`get_seq_lens`.
        nnz: number of appended tokens, ``append_indptr[-1]``. With ``batch_indices`` and ``positions`` it may
            be larger. Tokens after the last request are padding and get -1 and -1.
        batch_indices, positions: buffers of a CUDA graph, ``[nnz]`` int32 each, written. Both or neither.

    Returns:
        ``(batch_indices, positions)``, ``[nnz]`` int32 each: the buffers, or new tensors without them.

    Raises:
        ValueError: shapes or devices that do not fit, or arguments that overlap. On the CPU also an ``append_indptr`` that is negative,
            decreases or does not end at ``nnz``, or a request shorter than its appended tokens. On CUDA a
            token without a request gets -1 and -1. :func:`append_paged_kv_cache` skips such tokens.
        TypeError: indices that are no integers, buffers that are not int32, or one buffer without the other.
    """
    if batch_indices is None and positions is None:
        return _get_batch_indices_positions(append_indptr, seq_lens, nnz)  # type: ignore[no-any-return]
    op = "get_batch_indices_positions"
    (size,) = check_tensors(op, batch_indices=(batch_indices, "n"), positions=(positions, "n"))
    if differs(size, nnz):
        raise ValueError(f"{op}: batch_indices: got shape [{size}], wanted [{nnz}], which is nnz")
    _get_batch_indices_positions_out(append_indptr, seq_lens, batch_indices, positions)
    return batch_indices, positions  # type: ignore[return-value] # check_tensors has checked them


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the lengths of requests in a paged cache: ``max(pages - 1, 0) * page_size + kv_last_page_len``.

    Args:
        kv_indptr: ``[batch_size + 1]`` integers, the first page of each request.
        kv_last_page_len: ``[batch_size]`` integers, tokens of each request's last page, 0 for a request
            without pages.
        page_size: slots of a page.

    Returns:
        ``[batch_size]`` int32.

    Raises:
        ValueError: shapes, devices or a page size that do not fit. On the CPU also a length that is no int32.
        TypeError: indices that are no integers.
    """
    op = "get_seq_lens"
    check_one_device(op, ("kv_indptr", "kv_last_page_len"), (kv_indptr, kv_last_page_len))
    indptr = index_table(op, "kv_indptr", kv_indptr)
    last = index_table(op, "kv_last_page_len", kv_last_page_len)
    if differs(indptr.shape[0], last.shape[0] + 1):
        check_tensors(op, kv_last_page_len=(last, "b"), kv_indptr=(indptr, "b+1"))  # raises; costs 3 us in each call
    if not is_symbolic(page_size):
        whole(op, "page_size", page_size, 1, INT32_MAX)
    return _get_seq_lens(indptr, last, page_size)  # type: ignore[no-any-return]


def block_sparse_indices_to_vector_sparse_offsets(
    block_sparse_indices: torch.Tensor,
    block_sparse_indptr: torch.Tensor,
    vector_sparse_offsets: torch.Tensor,
    vector_sparse_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    stride_block: int,
    stride_n: int,
    block_size: int,
) -> torch.Tensor:
    """Write the offsets of single tokens from the indices of blocks.

    For token ``i < kv_lens[b]`` of request ``b``, ``vector_sparse_offsets[vector_sparse_indptr[b] + i]``
    becomes ``block_sparse_indices[block_sparse_indptr[b] + i // block_size] * stride_block + i % block_size *
    stride_n``.

    Args:
        block_sparse_indices: ``[num_blocks]`` integers.
        block_sparse_indptr, vector_sparse_indptr: ``[batch_size + 1]`` integers.
        vector_sparse_offsets: ``[n]`` int32, written in place. Elements of no request stay unchanged.
        kv_lens: ``[batch_size]`` integers, tokens of each request.
        stride_block, stride_n: strides of a block and of a token in it, in elements.
        block_size: tokens of a block.

    Returns:
        ``vector_sparse_offsets``.

    Raises:
        ValueError: shapes or devices that do not fit, or arguments that overlap. On the CPU also an index out
            of range or an offset that is no int32. On CUDA such a token is skipped.
        TypeError: indices that are no integers.
    """
    _block_sparse_offsets(
        block_sparse_indices,
        block_sparse_indptr,
        vector_sparse_offsets,
        vector_sparse_indptr,
        kv_lens,
        stride_block,
        stride_n,
        block_size,
    )
    return vector_sparse_offsets
