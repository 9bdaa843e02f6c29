"""Rotary position embedding with a quantised result: queries, keys and values of eight bits.

The formulas and the cache of angles are those of :func:`flashinfer.rope.apply_rope_with_cos_sin_cache`.

Source of the formats: Micikevicius et al.: FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.errors import type_error
from ._ops.indices import with_indices
from ._ops.numbers import check_option
from ._ops.route import without_gradient
from ._ops.scalars import scale_or_tensor
from ._ops.tensors import check_dims, check_tensor
from .errors import UnsupportedError
from .jit.modules.rope_quant import gen_rope_quant_module

__all__ = [
    "gen_rope_quant_module",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]

Number = float | torch.Tensor
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


_rope_quantize_fp8 = define(
    "rope_quantize_fp8(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope, Tensor cos_sin_cache,"
    " Tensor pos_ids, bool is_neox, float quant_scale_q, Tensor? quant_scale_q_tensor, float quant_scale_kv,"
    " Tensor? quant_scale_kv_tensor, Tensor(a!) q_rope_out, Tensor(b!) k_rope_out, Tensor(c!) q_nope_out,"
    " Tensor(d!) k_nope_out, bool? enable_pdl) -> ()",
    gen_rope_quant_module,
    fallback=without_gradient("rope_quantize_fp8", "q_rope", "k_rope", "q_nope", "k_nope"),
)
_append = with_indices(
    "rope_quantize_fp8_append_paged_kv_cache",
    define(
        "rope_quantize_fp8_append_paged_kv_cache(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope,"
        " Tensor? v, Tensor cos_sin_cache, Tensor pos_ids, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_indices,"
        " Tensor kv_indptr, Tensor batch_indices, Tensor positions, bool is_neox, float quant_scale_q,"
        " Tensor? quant_scale_q_tensor, float quant_scale_kv, Tensor? quant_scale_kv_tensor, SymInt page_size,"
        " bool heads_first, Tensor(c!) q_rope_out, Tensor(d!) q_nope_out, bool? enable_pdl) -> ()",
        gen_rope_quant_module,
        fallback=without_gradient(
            "rope_quantize_fp8_append_paged_kv_cache", "q_rope", "k_rope", "q_nope", "k_nope", "v"
        ),
    ),
    {9: "kv_indices", 10: "kv_indptr", 11: "batch_indices", 12: "positions"},
)


def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: Number = 1.0,
    quant_scale_kv: Number = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> Parts:
    """Rotate queries and keys, multiply them by a scale and round them to eight bits.

    The rotated numbers are rounded to the dtype of ``q_rope`` first. The product with the scale is float32.
    It is rounded to nearest, ties to even, and clamped to the finite numbers of the result. NaN stays NaN.

    Args:
        q_rope: ``[nnz, num_qo_heads, rope_dim]`` (float32, float16, bfloat16), rotated; any strides of tokens
            and heads.
        k_rope: ``[nnz, num_kv_heads, rope_dim]``, or ``[nnz, rope_dim]`` for the one head of MLA; same dtype.
        q_nope, k_nope: the elements of each head that are not rotated, of any size of the last dimension;
            other dimensions and dtype as ``q_rope`` and ``k_rope``. They are only scaled. ``None`` for none.
        cos_sin_cache: ``[max_position, rope_dim]`` (float32), the cosines first, then the sines; ``rope_dim``
            is even and at most 512.
        pos_ids: ``[nnz]`` (int32 or int64), rows of the cache.
        is_neox: pairs are elements ``(i, i + rope_dim / 2)`` of a head, otherwise ``(2 * i, 2 * i + 1)``.
        quantize_dtype: float8_e4m3fn or float8_e5m2; by default the dtype of the outputs, or float8_e4m3fn.
        quant_scale_q, quant_scale_kv: factors of the queries and of the keys: positive numbers, or tensors of one
            element (float32, float64) on the device of ``q_rope``. The host never reads a tensor.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: outputs of the shapes of the inputs, written. They may
            be slices of one tensor. By default they are new tensors.
        enable_pdl: programmatic dependent launch (compute capability 9.0 and newer).
        backend: ``"cuda"``, which stands for the kernels of the tensors' device.

    Returns:
        ``(q_rope_out, k_rope_out, q_nope_out, k_nope_out)``. The last two have a last dimension of 0 without
        ``q_nope`` or ``k_nope``.

    Raises:
        ValueError: invalid shapes, strides, devices, scales or backend, or arguments that overlap. On the CPU
            also a position outside of the cache. On CUDA a token with such a position is not rotated.
        TypeError: invalid dtypes.
        UnsupportedError: backend ``"cutile"``.
        GradientError: a tensor requires a gradient; there is none.
    """
    op = "rope_quantize_fp8"
    _check_backend(op, backend)
    dtype = _dtype(op, quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q_rope_out = _output(op, "q_rope", q_rope, q_rope_out, dtype)
    k_rope_out = _output(op, "k_rope", k_rope, k_rope_out, dtype)
    q_nope, k_nope = _or_empty(op, "q_rope", q_nope, q_rope), _or_empty(op, "k_rope", k_nope, k_rope)
    q_nope_out = _output(op, "q_nope", q_nope, q_nope_out, dtype)
    k_nope_out = _output(op, "k_nope", k_nope, k_nope_out, dtype)
    _rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox,
        *scale_or_tensor(quant_scale_q, q_rope), *scale_or_tensor(quant_scale_kv, q_rope), q_rope_out, k_rope_out,
        q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: Number = 1.0,
    quant_scale_kv: Number = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> Parts:
    """Apply :func:`rope_quantize_fp8` to queries and to the one head of compressed keys of MLA.

    Args:
        k_rope, k_nope: ``[nnz, rope_dim]`` and ``[nnz, nope_dim]``.
        q_rope, q_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype: as for :func:`rope_quantize_fp8`.
        quant_scale_q, quant_scale_kv, enable_pdl, backend: likewise.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: likewise. Result and errors are also those of
            :func:`rope_quantize_fp8`.

    Source: DeepSeek-AI: DeepSeek-V2, 2024, section 2.1.
    """
    check_dims("mla_rope_quantize_fp8", "k_rope", k_rope, 2)
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl, backend,
    )  # fmt: skip


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: Number = 1.0,
    quant_scale_kv: Number = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply :func:`rope_quantize_fp8`, and write keys and values into a paged cache.

    Slots are those of :func:`flashinfer.page.append_paged_kv_cache`. Values are only scaled, by
    ``quant_scale_kv``.

    Args:
        v: ``[nnz, num_kv_heads, head_dim_vo]``, dtype of ``q_rope``; ``None`` with ``k_rope`` of MLA.
        paged_kv_cache: two tensors of eight bits, written. For keys of heads ``(k_cache, v_cache)``:
            ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages, num_kv_heads, page_size,
            head_dim]`` (HND). A row of ``k_cache`` holds the rotated elements first, then those of
            ``k_nope``. For MLA ``(ckv_cache, kpe_cache)``: ``[num_pages, page_size, nope_dim]`` and
            ``[num_pages, page_size, rope_dim]``.
        kv_indices, kv_indptr, batch_indices, positions: integers, as for
            :func:`flashinfer.page.append_paged_kv_cache`. A token with -1 and -1 is padding: it writes no
            slot.
        quantize_dtype: dtype of the outputs and of the cache, which is the default.
        page_size: slots of a page, as the cache has.
        kv_layout: ``"NHD"`` or ``"HND"``; MLA ignores it.
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox: as for :func:`rope_quantize_fp8`.
        quant_scale_q, quant_scale_kv, q_rope_out, q_nope_out, enable_pdl: likewise.

    Returns:
        ``(q_rope_out, q_nope_out)``. The second has a last dimension of 0 without ``q_nope``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`rope_quantize_fp8`. On the CPU a ``ValueError`` also
            for a token whose request, position or page does not exist. On CUDA such a token writes no slot.
    """
    op = "rope_quantize_fp8_append_paged_kv_cache"
    check_tensor(op, "q_rope", q_rope)
    check_option(op, "kv_layout", kv_layout, ("NHD", "HND"))
    if not isinstance(paged_kv_cache, tuple | list) or len(paged_kv_cache) != 2:
        raise type_error(op, "paged_kv_cache", type(paged_kv_cache).__name__, "a pair of tensors")
    k_cache, v_cache = paged_kv_cache
    dtype = _dtype(op, quantize_dtype, q_rope_out, q_nope_out, k_cache)
    q_rope_out = _output(op, "q_rope", q_rope, q_rope_out, dtype)
    q_nope, k_nope = _or_empty(op, "q_rope", q_nope, q_rope), _or_empty(op, "k_rope", k_nope, k_rope)
    q_nope_out = _output(op, "q_nope", q_nope, q_nope_out, dtype)
    _append(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, k_cache, v_cache, kv_indices, kv_indptr,
        batch_indices, positions, is_neox, *scale_or_tensor(quant_scale_q, q_rope),
        *scale_or_tensor(quant_scale_kv, q_rope), page_size, kv_layout == "HND", q_rope_out, q_nope_out, enable_pdl,
    )  # fmt: skip
    return q_rope_out, q_nope_out


def _check_backend(op: str, backend: str) -> None:
    if backend == "cutile":
        raise UnsupportedError(f"{op}: backend: got 'cutile', kernels in another language; wanted 'cuda'")
    check_option(op, "backend", backend, ("cuda",))


def _dtype(op: str, dtype: torch.dtype | None, *outputs: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of new outputs. The operator rejects outputs of another one."""
    given = next((out.dtype for out in outputs if isinstance(out, torch.Tensor)), None)
    if dtype is None:
        return torch.float8_e4m3fn if given is None else given
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise type_error(op, "quantize_dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    if given is not None and given != dtype:
        raise type_error(op, "quantize_dtype", dtype, f"{given} as the outputs have")
    return dtype


def _output(op: str, name: str, x: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    check_tensor(op, name, x)
    return x.new_empty(x.shape, dtype=dtype) if out is None else out


def _or_empty(op: str, name: str, nope: torch.Tensor | None, rope: torch.Tensor) -> torch.Tensor:
    """Return the part of a head that is not rotated, of size 0 without one."""
    check_tensor(op, name, rope)
    return rope[..., :0] if nope is None else nope
