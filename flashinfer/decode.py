"""Attention of one new token for each request: over one request's keys, or over a batch's in a paged cache.

The output is ``softmax(sm_scale * q . k) @ v``, for query head ``h`` over key head ``h // (num_qo_heads / num_kv_heads)``;
lse is the logarithm in base 2 of the sum of ``2^(logit * log2 e)``, as :func:`flashinfer.merge_state` takes it. Where
there is no key to see, the output is 0 and lse -inf.

Source: Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023; Ye et al.:
FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving, 2025.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from . import _unsupported
from ._attention.accepted import check_backend, check_hints, check_one_query, check_run, cut_of
from ._attention.arguments import NON_CAUSAL, PagedCache, layout_of, logits_of
from ._attention.bound import BoundCalls
from ._attention.engines import fast_decode_plan
from ._attention.lists import Shape
from ._attention.masks import MaskTensors
from ._attention.one_request import attend_one, run_one
from ._attention.operators import operators_of_module
from ._attention.scales import Scale
from ._attention.tables import Tables, on_host, paged_batch
from ._attention.wrapper import BatchWrapper
from ._compat import elsewhere
from ._ops.indices import index_tables
from ._ops.numbers import whole
from ._ops.tensors import check_dims
from .jit.modules.decode import (
    gen_batch_decode_module,
    gen_customize_batch_decode_module,
    gen_customize_single_decode_module,
    gen_single_decode_module,
)

# Engines import it from here.
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

# FlashInfer has these here too. Other families are imported when they are used.
__getattr__ = elsewhere(__name__, {"BatchDecodeMlaWithPagedKVCacheWrapper": "mla", "get_seq_lens": "page"})

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
    """Attention of one query token over one request's keys and values.

    Args:
        q: ``[num_qo_heads, head_dim]`` (float16, bfloat16; float32 on the CPU), the last token of the request.
        k, v: ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND), both of one dtype:
            ``q``'s, float8_e4m3fn or float8_e5m2. ``num_kv_heads`` divides ``num_qo_heads``. Strides are free; what
            kernels cannot read in place is copied.
        kv_layout: ``"NHD"`` or ``"HND"``.
        pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` (rotates ``q`` and ``k`` on the fly, halves of a head against each
            other) or ``"ALIBI"`` (adds a head's slope times the distance to each logit).
        use_tensor_cores: accepted; kernels are chosen by the library.
        q_scale, k_scale, v_scale: what quantised values are to be multiplied by: numbers, or tensors of one element or of
            one per head. A tensor on a GPU is multiplied into the query or the output, and never read on the host.
        window_left: the query sees this many keys to its left and the last one; -1: all.
        logits_soft_cap: logits become ``cap * tanh(logit / cap)`` where this is above 0.
        sm_scale: by default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta: 1 and 1e4 by default: pair ``i`` of a head at position ``p`` turns by
            ``p / rope_scale * rope_theta^(-2 i / head_dim)``.
        return_lse: also return the lse.

    Returns:
        ``[num_qo_heads, head_dim]`` of ``q``'s dtype; with ``return_lse`` also ``[num_qo_heads]`` float32.

    Raises:
        ValueError: shapes, sizes, layouts, devices or modes that do not fit, with those that there are.
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
    _CALLS.keep(q, k, v, options, layout_of(op, kv_layout), NON_CAUSAL, logits)
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
    """:func:`single_decode_with_kv_cache` by a variant of your own.

    Args:
        jit_module: what ``gen_customize_single_decode_module(...).build_and_load()`` returned.
        q: ``[num_qo_heads, head_dim]``.
        k, v: ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND).
        kv_layout, window_left, return_lse: as for :func:`single_decode_with_kv_cache`, as is the result.
        args: the variant's additional tensors, then its scalars, in the order in which they were named.

    Raises:
        ValueError, TypeError: as :func:`single_decode_with_kv_cache`; arguments that are not those of the variant.
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
    """Attention of one query token for each request of a batch, over a paged cache.

    ``plan()`` once for each set of lengths, then ``run()`` as often as there are layers.

    Args:
        float_workspace_buffer: contiguous, of any dtype, on the device that the wrapper is for: partial results of keys
            that are split lie there. 128 MiB are plenty; one that is too small is an error of ``plan()``.
        kv_layout: of caches, ``"NHD"`` or ``"HND"``.
        use_cuda_graph: ``run()`` will be captured, and ``plan()`` serve its replays: tables then lie in the buffers below,
            and the number of requests is theirs.
        use_tensor_cores: accepted; kernels are chosen by the library.
        paged_kv_indptr_buffer: ``[batch_size + 1]`` int32, for ``indptr``.
        paged_kv_indices_buffer: int32, as long as ``indices`` will ever be.
        paged_kv_last_page_len_buffer: ``[batch_size]`` int32, for ``last_page_len``.
        jit_args: the arguments of :func:`gen_customize_batch_decode_module` less ``backend``: a variant of your own, which is
            built here. ``run()`` then takes its additional tensors and scalars.
        backend: ``"auto"`` and ``"fa2"``: the portable kernels. ``"fa3"``: those for GPUs of compute capability 9.0, which
            merge split keys themselves; without RoPE on the fly, and without ``jit_args``.

    Raises:
        ValueError, TypeError: buffers, a layout or a backend that do not fit.
    """

    _family = "decode"

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
        if backend == "fa3" and jit_args is not None:
            raise ValueError(
                f"{type(self).__name__}: backend: got 'fa3' with jit_args, wanted 'auto' or 'fa2': a variant of your own is"
                " built for the portable kernels"
            )
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
        """What the constructor was given."""
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
        """Balance the work of a batch; to be called whenever lengths change.

        Args:
            indptr: ``[batch_size + 1]`` integers, where each request's pages begin in ``indices``. On the CPU nothing is
                waited for; tables of a GPU are read back once, all in one copy. The table may be a slice of a longer one,
                beside the whole ``indices``.
            indices: ``[indptr[-1]]`` integers or longer, the pages; requests may share some.
            last_page_len: ``[batch_size]`` integers, entries of each request's last page, 1 to ``page_size``. A request
                without pages has no keys, and its entry here means nothing.
            num_qo_heads, num_kv_heads, head_dim, page_size: of what will be run.
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta: as for
                :func:`single_decode_with_kv_cache`. With ``jit_args`` the variant's parameters stand for most of them:
                ``sm_scale`` is not used, a mode or a cap is an error.
            q_data_type, kv_data_type: of what will be run; ``kv_data_type`` is ``q_data_type`` by default.
            data_type: stands for those of the two that are ``None``.
            non_blocking: whether tables in pinned memory are copied without waiting: they must then stay as they are until
                the copies are done. All others may change once this returns.
            block_tables: ``None``: pages are named by ``indices``.
            seq_lens: ``[batch_size]``, lengths of keys, which the tables say too: not read.
            fixed_split_size: keys are cut at multiples of so many pages, whatever the batch: a request's result is then the
                same, bit for bit, alone and in every batch. ``None`` and -1: cut as balances the work. A CUDA graph may have
                no room for the pieces of longer requests, which is an error of ``plan()``.
            disable_split_kv: never cut keys; goes before ``fixed_split_size``, with the same effect on results.
            o_data_type: of the output. By default ``q_data_type``, and float16 for queries of eight bits.
            q_len_per_req: 1, queries of each request.

        Raises:
            UnsupportedError: another ``q_len_per_req``.
            ValueError: tables, sizes or modes that do not fit, a buffer that is too small (which, wanted, got), or a plan
                beyond what a CUDA graph was captured with.
            TypeError: dtypes that do not fit.

        Under CUDA graphs the first plan fixes what later ones must fit into. Scales, windows, modes and dtypes are captured
        as they are; what a replay follows are the tables.
        """
        op = f"{self._name}.plan"
        check_one_query(op, q_len_per_req)
        q_data_type, kv_data_type = q_data_type or data_type or "float16", kv_data_type or data_type
        o_data_type = self._dtype_o or o_data_type
        shape = Shape.of(op, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type)
        logits = logits_of(
            op, head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        tables = Tables(op, self.device, non_blocking)
        given = index_tables(op, indptr=indptr, indices=indices, last_page_len=last_page_len)
        check_hints(op, given["indptr"].numel() - 1, seq_lens, block_tables)
        near = on_host(given["indptr"], given["last_page_len"])
        batch = paged_batch(tables, self._paged_buffers, None, page_size, near, **given)
        self._cut = cut_of(op, fixed_split_size, disable_split_kv, page_size)
        self._plan(batch, shape, logits, NON_CAUSAL, MaskTensors(), page_size, tables)
        if not self._use_cuda_graph:
            self._paged_kv_last_page_len_buf = given["last_page_len"]

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
        q_len_per_req: int | None = 1,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: ``[batch_size, num_qo_heads, head_dim]``.
            paged_kv_cache: ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[max_num_pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a ``(k_cache, v_cache)`` pair without the
                dimension of 2. Strides are free but for the last dimension, which is contiguous; on CUDA rows start at
                multiples of 16 bytes. What lies in places that no request owns has no influence, whatever it is.
            args: with ``jit_args``, the variant's additional tensors, then its scalars.
            q_scale, k_scale, v_scale: as for :func:`single_decode_with_kv_cache`.
            out: ``[batch_size, num_qo_heads, head_dim]``, to be written; made by default.
            lse: ``[batch_size, num_qo_heads]`` float32, contiguous, to be written where it is given.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted.
            window_left: ``None``, or what was planned.
            sinks: ``[num_qo_heads]`` float32, a logit of each query head that joins the softmax of its rows, behind scale and
                cap, and has no value: weights of keys then add up to less than 1, and the lse has it too.
            q_len_per_req: 1, queries of each request.
            kv_cache_sf: ``None``: there are no caches of 4 bits.

        Raises:
            ValueError: no plan, or shapes, strides or devices other than those planned for.
            TypeError: dtypes other than those planned for.
        """
        if not (window_left is None and kv_cache_sf is None and q_len_per_req == 1):
            check_run(f"{self._name}.run", self._window_left, window_left, q_len_per_req, kv_cache_sf)
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
        """Deprecated: :meth:`run` with options that take the place of those of :meth:`plan`, until the next plan.

        They are arguments of the kernels: layers may alternate, also in a captured graph, and no plan is made for them
        where the last one holds all keys that they see: plan without a mask and without a window where these differ.

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
        workspace_buffer, kv_layout, use_tensor_cores: as there.
        indptr_buffer, indices_buffer, last_page_len_buffer: its ``paged_kv_*_buffer``.
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


_unsupported.declare(
    globals(),
    _unsupported.TRTLLM_GEN,
    functions=("trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla"),
)
