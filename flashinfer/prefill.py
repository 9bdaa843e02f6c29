"""Attention of any number of query tokens for each request: over its own keys, or a batch's over ragged or paged ones.

The output is ``softmax(sm_scale * q . k) @ v``, for query head ``h`` over key head ``h // (num_qo_heads / num_kv_heads)``;
lse is the logarithm in base 2 of the sum of ``2^(logit * log2 e)``, as :func:`flashinfer.merge_state` takes it. Where
there is no key to see, the output is 0 and lse -inf. The queries of a request are its last tokens: the last query
stands at the last key, in causal masks, windows and position encodings alike.

Source: Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023; Ye et al.:
FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving, 2025.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._attention.arguments import CAUSAL, CUSTOM, NON_CAUSAL, layout_of, logits_of
from ._attention.backward import single, wanted
from ._attention.bound import BoundCalls
from ._attention.kernels import size_class
from ._attention.masks import one_mask
from ._attention.one_request import attend_one, run_one
from ._attention.operators import operators_of_module
from ._attention.prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from ._attention.prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from ._attention.scales import Scale
from ._ops.dtypes import is_fp8
from ._ops.numbers import whole
from ._ops.tensors import check_dims

# vLLM imports it from here.
from ._unsupported import trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache
from .jit.modules.prefill import (
    check_kernels,
    gen_batch_prefill_module,
    gen_customize_batch_prefill_module,
    gen_customize_single_prefill_module,
    gen_single_prefill_module,
)

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
        q: ``[qo_len, num_qo_heads, head_dim_qk]`` (float16, bfloat16; float32 on the CPU; on Hopper also float8_e4m3fn and
            float8_e5m2, with keys of the same), the last tokens of the request.
        k, v: ``[kv_len, num_kv_heads, head_dim_qk]`` and ``[kv_len, num_kv_heads, head_dim_vo]`` (NHD), or with the first two
            dimensions exchanged (HND); both of one dtype: ``q``'s, float8_e4m3fn or float8_e5m2. ``num_kv_heads`` divides
            ``num_qo_heads``. Strides are free; what kernels cannot read in place is copied.
        scale_q, scale_k, scale_v: what quantised values are to be multiplied by: numbers, or tensors of one element or of
            one per head. A tensor on a GPU is multiplied into the query or the output (where ``q`` is float8, into logits and
            output by the kernel), and never read on the host.
        o_dtype: of the output, ``q``'s by default, float16 where that is float8.
        custom_mask: ``[qo_len, kv_len]`` bool, or flattened, True where a query may see a key; ``causal`` then means
            nothing.
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
    if o_dtype is None and isinstance(q, torch.Tensor) and is_fp8(q.dtype):
        o_dtype = torch.float16
    if custom_mask is None and packed_custom_mask is None and o_dtype is None:
        options = (causal, kv_layout, pos_encoding_mode, window_left, logits_soft_cap, rope_scale, rope_theta, backend)
        options = (*options, size_class(q, k, kv_layout))
        result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
        if result is not None:
            return result
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dims(op, name, x, 3)
    check_kernels(backend, "single_prefill_with_kv_cache: ")
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
        q: ``[qo_len, num_qo_heads, head_dim_qk]``.
        k, v: ``[kv_len, num_kv_heads, head_dim_qk]`` and ``[kv_len, num_kv_heads, head_dim_vo]`` (NHD), or with the first two
            dimensions exchanged (HND).
        kv_layout, window_left, return_lse: as for :func:`single_prefill_with_kv_cache`, as is the result.
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
    layout = layout_of(op, kv_layout)
    out, lse = run_one(
        op, operators, q, k, v, layout, whole(op, "window_left", window_left), args, int(mask_mode), return_lse
    )
    return (out, lse) if lse is not None else out
