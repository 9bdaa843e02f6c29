"""Attention of any number of query tokens: of one request, or of a batch with a ragged or a paged cache.

The output is ``softmax(sm_scale * q . k) @ v``. Query head ``h`` reads key head ``h // (num_qo_heads /
num_kv_heads)``. The lse is the base-2 logarithm of the sum of ``exp(logit)``, as for
:func:`flashinfer.merge_state`. A query that sees no key has output 0 and lse ``-inf``. The queries of a
request are its last tokens. The last query has the position of the last key in causal masks, windows and
position encodings.

Source: Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023; Ye
    et al.:
FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving, 2025.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._attention.arguments import CAUSAL, CUSTOM, NON_CAUSAL, layout_of, logits_of
from ._attention.backward import differentiable_single, needs_differentiable
from ._attention.bound import BoundCalls
from ._attention.kernels import size_class
from ._attention.masks import one_mask
from ._attention.one_request import attend_one, run_one
from ._attention.operators import operators_of_module
from ._attention.prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from ._attention.prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from ._attention.scales import Scale
from ._compat import elsewhere
from ._compat.refused import declare
from ._ops.dtypes import is_fp8
from ._ops.numbers import check_option, whole
from ._ops.tensors import check_dims
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

# FlashInfer has this name here. Its schedule is another family, which is imported when it is used.
__getattr__ = elsewhere(__name__, {"trtllm_fmha_v2_prefill": "_attention.device_prefill"})

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
    """Compute attention of one request's queries over its keys and values.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]``, the last tokens of the request. float16 or bfloat16; on
            the CPU also float32; on Hopper also float8_e4m3fn and float8_e5m2 with keys of the same dtype.
        k, v: ``[kv_len, num_kv_heads, head_dim_qk]`` and ``[kv_len, num_kv_heads, head_dim_vo]`` (NHD), or
            with the first two dimensions exchanged (HND). Both have one dtype: ``q``'s, float8_e4m3fn or
            float8_e5m2. ``num_kv_heads`` divides ``num_qo_heads``. Strides are free; tensors that kernels
            cannot read are copied.
        scale_q, scale_k, scale_v: factors of quantised values: numbers, or tensors of one element or of one
            per head. The host never reads a tensor on a GPU. The tensor is multiplied into the query or the
            output. If ``q`` is float8, the kernel multiplies it into logits and output.
        o_dtype: dtype of the output, ``q``'s by default, float16 if that is float8.
        custom_mask: ``[qo_len, kv_len]`` bool, or flattened. True if a query sees a key. ``causal`` is then
            ignored.
        packed_custom_mask: the bits of ``custom_mask``, from :func:`flashinfer.packbits` with
            ``bitorder="little"``. It has priority over ``custom_mask``.
        causal: hide keys after a query's own position.
        kv_layout: ``"NHD"`` or ``"HND"``.
        pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` (rotates halves of ``q`` and ``k``) or ``"ALIBI"``
            (adds slope * distance to a logit).
        use_fp16_qk_reduction: accepted and ignored. Sums are in float32.
        sm_scale: factor of the logits, by default ``1 / sqrt(head_dim_qk)``.
        window_left: keys to the left of its own position that a query sees; -1: all.
        logits_soft_cap: if positive, a logit becomes ``cap * tanh(logit / cap)``.
        rope_scale, rope_theta: 1 and 1e4 by default. At position ``p``, pair ``i`` is rotated by
            ``p / rope_scale * rope_theta^(-2 i / head_dim_qk)``.
        backend: ``"fa2"``: portable kernels. ``"fa3"``: kernels for Hopper. ``"auto"``: ``"fa3"`` for long
            requests on Hopper.
        return_lse: also return the lse.

    Returns:
        ``[qo_len, num_qo_heads, head_dim_vo]`` of ``o_dtype``. With ``return_lse`` also ``[qo_len,
        num_qo_heads]`` float32. Both have gradients for ``q``, ``k`` and ``v``. On the CPU float64 is
        supported to check gradients.

    Raises:
        ValueError: shapes, sizes, layouts, devices or modes that do not fit.
        TypeError: dtypes that do not fit.
        GradientError: a gradient is required with scales or of float8.
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
    if needs_differentiable(q, k, v):
        return differentiable_single(op, q, k, v, kv_layout, logits, scales, o_dtype, mode, packed, return_lse)
    if options is not None:
        _CALLS.bind(q, k, v, options, layout_of(op, kv_layout), mode, logits, backend)
        result = _CALLS.call(q, k, v, options, scales, return_lse, sm_scale)
        if result is not None:
            return result
    out, lse = attend_one("prefill", op, q, k, v, kv_layout, logits, scales, o_dtype, mode, packed, return_lse, backend)
    return (out, lse) if lse is not None else out


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse.__doc__ = (
    """Compute :func:`single_prefill_with_kv_cache` with ``return_lse=True``."""
)


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
    """Compute :func:`single_prefill_with_kv_cache` with a custom variant.

    Args:
        jit_module: result of ``gen_customize_single_prefill_module(...).build_and_load()``.
        q: ``[qo_len, num_qo_heads, head_dim_qk]``.
        k, v: ``[kv_len, num_kv_heads, head_dim_qk]`` and ``[kv_len, num_kv_heads, head_dim_vo]`` (NHD), or
            with the first two dimensions exchanged (HND).
        kv_layout, window_left, return_lse: as for :func:`single_prefill_with_kv_cache`.
        args: the variant's additional tensors, then its scalars, in the order of their declaration.
        mask_mode: 0, or 1 for a causal mask. The variant applies every other mask.

    Returns:
        The results of :func:`single_prefill_with_kv_cache`.

    Raises:
        ValueError, TypeError: as :func:`single_prefill_with_kv_cache`, or arguments that do not fit the
            variant.
    """
    op = "single_prefill_with_kv_cache_with_jit_module"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dims(op, name, x, 3)
    check_option(op, "mask_mode", mask_mode, (NON_CAUSAL, CAUSAL), ": other masks are the variant's")
    operators = operators_of_module(op, jit_module)
    layout = layout_of(op, kv_layout)
    out, lse = run_one(
        op, operators, q, k, v, layout, whole(op, "window_left", window_left), args, int(mask_mode), return_lse
    )
    return (out, lse) if lse is not None else out


declare(globals())
