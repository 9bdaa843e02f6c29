"""Rotary position embedding of queries and keys.

A pair ``(a, b)`` of a head's elements is rotated by an angle that grows with the token's position:
``(a * cos - b * sin, b * cos + a * sin)``. All functions compute in float32 from angles that are reduced in
float64, so positions up to a million and beyond cost no accuracy.

Every function has a gradient, the rotation back, also in place: autograd treats the write as a ``copy_``. The
CPU also takes float64, to check gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._compat import elsewhere
from ._ops.declare import define
from ._ops.route import Fallback, Gradient, write
from ._ops.scalars import as_tensor, is_symbolic
from .jit.modules.rope import gen_rope_module

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "gen_rope_module",
]

# FlashInfer has these names here too. Their family is imported when they are used.
__getattr__ = elsewhere(
    __name__,
    dict.fromkeys(
        ("mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"), "rope_quant"
    ),
)


def _like_q_and_k(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _like_query_and_key(_: Any, query: torch.Tensor, key: torch.Tensor, *__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


_NUMBERS = ("rope_scale", "rope_theta", "low_freq_factor", "high_freq_factor", "old_context_len")
_ANGLES = (
    "int? rotary_dim, bool interleave, float rope_scale, float rope_theta,"
    " bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len"
)


def _frequencies(
    rotary_dim: int, device: torch.device, rope_scale: float, rope_theta: float,
    llama31: bool, low_freq_factor: float, high_freq_factor: float, old_context_len: int,
) -> torch.Tensor:  # fmt: skip
    """Return ``[rotary_dim / 2]`` float64, radians per position, as the operators compute them."""
    scale, theta, low, high, context = (
        as_tensor(number, device)
        for number in (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    )
    frequency = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -rotary_dim)
    if not llama31:
        return frequency / scale
    rotations = context * frequency / (2 * math.pi)
    unscaled = torch.where(rotations >= high, 1.0, torch.where(rotations <= low, 0.0, (rotations - low) / (high - low)))
    return unscaled * frequency + (1 - unscaled) * frequency / scale


def _rotated_back(autograd: Callable[[], Callable[..., Any]], first: int) -> Gradient:
    """Return the gradient of an operator with q and k from argument ``first`` on, and ``inverse`` last."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.arguments = [None if isinstance(one, torch.Tensor) else one for one in inputs]
        ctx.tensors = [i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor) and i - first not in (0, 1)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        arguments = [*ctx.arguments[:-1], not ctx.arguments[-1]]
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            arguments[i] = tensor
        arguments[first : first + 2] = [grad.contiguous() for grad in grads]
        result = [None] * len(arguments)
        result[first : first + 2] = autograd()(*arguments)
        return tuple(result)

    return Gradient(setup_context, backward)


def _define_rope(name: str, tables: tuple[str, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    where = ", ".join(f"Tensor {table}" for table in tables)
    autograd = define(
        f"{name}_autograd(Tensor q, Tensor k, {where}, {_ANGLES}, Tensor? frequencies, bool inverse)"
        " -> (Tensor, Tensor)",
        gen_rope_module,
        _like_q_and_k,
        gradient=_rotated_back(lambda: autograd, 0),
    )

    def new(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
        tensors, (rotary_dim, interleave, *numbers) = rest[: len(tables)], rest[len(tables) :]
        if not (is_dynamo_compiling() and any(is_symbolic(number) for number in numbers)):
            return autograd(q, k, *rest, None, False)
        frequencies = _frequencies(q.shape[-1] if rotary_dim is None else rotary_dim, q.device, *numbers)
        return autograd(q, k, *tensors, rotary_dim, interleave, 1.0, 1.0, *_PLAIN, frequencies, False)

    def in_place(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
        for argument, out, result in zip("qk", (q, k), new(q, k, *rest), strict=True):
            write(name, argument, out, result)

    return (
        define(
            f"{name}(Tensor q, Tensor k, {where}, {_ANGLES}) -> (Tensor, Tensor)",
            gen_rope_module,
            _like_q_and_k,
            fallback=Fallback(new, ("q", "k"), _NUMBERS),
        ),
        define(
            f"{name}_inplace(Tensor(a!) q, Tensor(b!) k, {where}, {_ANGLES}) -> ()",
            gen_rope_module,
            fallback=Fallback(in_place, ("q", "k"), _NUMBERS),
        ),
    )


def _define_rope_with_cache() -> tuple[Callable[..., Any], Callable[..., Any]]:
    name, rest = "apply_rope_with_cos_sin_cache", "SymInt head_size, Tensor cos_sin_cache, bool is_neox"
    autograd = define(
        f"{name}_autograd(Tensor positions, Tensor query, Tensor key, {rest}, bool inverse) -> (Tensor, Tensor)",
        gen_rope_module,
        _like_query_and_key,
        gradient=_rotated_back(lambda: autograd, 1),
    )

    def new(*args: Any) -> Any:
        return autograd(*args, False)

    def in_place(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> None:
        for argument, out, result in zip(
            ("query", "key"), (query, key), new(positions, query, key, *rest), strict=True
        ):
            write(name, argument, out, result)

    return (
        define(
            f"{name}(Tensor positions, Tensor query, Tensor key, {rest}) -> (Tensor, Tensor)",
            gen_rope_module,
            _like_query_and_key,
            fallback=Fallback(new, ("query", "key")),
        ),
        define(
            f"{name}_inplace(Tensor positions, Tensor(a!) query, Tensor(b!) key, {rest}) -> ()",
            gen_rope_module,
            fallback=Fallback(in_place, ("query", "key")),
        ),
    )


_PLAIN = (False, 0.0, 0.0, 0)  # without Llama 3.1's scaling
_rope, _rope_inplace = _define_rope("apply_rope", ("indptr", "offsets"))
_rope_pos_ids, _rope_pos_ids_inplace = _define_rope("apply_rope_pos_ids", ("pos_ids",))
_rope_with_cache, _rope_with_cache_inplace = _define_rope_with_cache()


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the queries and keys of a batch of requests with consecutive tokens.

    Pair ``i`` is rotated by ``position / rope_scale * rope_theta ** (-2 * i / rotary_dim)`` radians. Token
    ``j`` of request ``r``, which is row ``indptr[r] + j`` of ``q`` and ``k``, has position
    ``offsets[r] + j``. Rows from ``indptr[-1]`` on have position 0.

    Args:
        q: ``[nnz, num_qo_heads, head_dim]`` (float32, float16, bfloat16); any strides of tokens and heads.
        k: ``[nnz, num_kv_heads, head_dim]``, same dtype.
        indptr: ``[batch_size + 1]`` (int32 or int64), ascending from 0: the first row of each request.
        offsets: ``[batch_size]`` (int32 or int64), the position of each request's first token.
        rotary_dim: number of leading elements of a head that are rotated; even, at most 512; by default all.
            Others are copied.
        interleave: pairs are elements ``(2 * i, 2 * i + 1)`` of a head; by default
            ``(i, i + rotary_dim / 2)``.
        rope_scale: divides positions.
        rope_theta: base of the frequencies.

    Returns:
        The rotated ``q`` and ``k``, new and contiguous.

    Raises:
        ValueError: invalid shapes, strides, devices or numbers. Values of ``indptr`` are checked only on the
            CPU. On CUDA the check would wait for the GPU.
        TypeError: invalid dtypes.

    Source: Su et al.: RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    return _rope(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *_PLAIN)  # type: ignore[no-any-return]


def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Apply :func:`apply_rope` in place to ``q`` and ``k``, ``[nnz, heads, head_dim]``.

    Raises:
        ValueError, TypeError: as :func:`apply_rope`; also ``ValueError`` if ``q`` and ``k`` share elements.
            They may be parts of one fused projection.
    """
    _rope_inplace(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *_PLAIN)


def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply :func:`apply_rope` with a position for every token.

    Args:
        pos_ids: ``[nnz]`` (int32 or int64), of either sign, within 32 bits.
        q, k, rotary_dim, interleave, rope_scale, rope_theta: as for :func:`apply_rope`, also result and
            errors.
    """
    return _rope_pos_ids(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *_PLAIN)  # type: ignore[no-any-return]


def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Apply :func:`apply_rope_pos_ids` in place to ``q`` and ``k``; errors as :func:`apply_rope_inplace`."""
    _rope_pos_ids_inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *_PLAIN)


def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply :func:`apply_rope` with the frequencies of Llama 3.1.

    Only low ones are divided by ``rope_scale``.

    A frequency makes ``n = old_context_len * frequency / (2 * pi)`` rotations in the old context. It stays
    unchanged if ``n`` is at least ``high_freq_factor``, and is divided by ``rope_scale`` if ``n`` is at most
    ``low_freq_factor``. Between the two it is blended linearly in ``n``.

    Args:
        low_freq_factor, high_freq_factor: numbers of rotations; positive, the second not below the first.
        old_context_len: tokens of the model's original context.
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta: as for :func:`apply_rope`, also
            result and errors.

    Source: the reference implementation of Llama 3.1, 2024.
    """
    llama31 = (True, low_freq_factor, high_freq_factor, old_context_len)
    return _rope(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *llama31)  # type: ignore[no-any-return]


def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Apply :func:`apply_llama31_rope` in place to ``q`` and ``k``; errors as :func:`apply_rope_inplace`."""
    llama31 = (True, low_freq_factor, high_freq_factor, old_context_len)
    _rope_inplace(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *llama31)


def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply :func:`apply_llama31_rope` with positions ``pos_ids``, as in :func:`apply_rope_pos_ids`."""
    llama31 = (True, low_freq_factor, high_freq_factor, old_context_len)
    return _rope_pos_ids(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *llama31)  # type: ignore[no-any-return]


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Apply :func:`apply_llama31_rope_pos_ids` in place; errors as :func:`apply_rope_inplace`."""
    llama31 = (True, low_freq_factor, high_freq_factor, old_context_len)
    _rope_pos_ids_inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *llama31)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by angles from a table of cosines and sines for every position.

    Args:
        positions: ``[nnz]`` (int32 or int64), rows of the cache.
        query: ``[nnz, num_qo_heads * head_size]`` or ``[nnz, num_qo_heads, head_size]`` (float32, float16,
            bfloat16); any strides of tokens and heads.
        key: the same with ``num_kv_heads``, same dtype.
        head_size: elements of a head; the first ``rotary_dim`` of them are rotated, others are copied.
        cos_sin_cache: ``[max_position, rotary_dim]`` (float32), the cosines first, then the sines;
            ``rotary_dim`` is even and at most 512.
        is_neox: pairs are elements ``(i, i + rotary_dim / 2)`` of a head, otherwise ``(2 * i, 2 * i + 1)``.

    Returns:
        The rotated ``query`` and ``key``, new and contiguous, of the same shapes.

    Raises:
        ValueError: invalid shapes, strides or devices, or on the CPU a position outside of the cache. On CUDA
            the host cannot read positions without waiting; a token with such a position is not rotated.
        TypeError: invalid dtypes.

    Source: as :func:`apply_rope`.
    """
    return _rope_with_cache(positions, query, key, head_size, cos_sin_cache, is_neox)  # type: ignore[no-any-return]


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Apply :func:`apply_rope_with_cos_sin_cache` in place to ``query`` and ``key``.

    Raises:
        ValueError, TypeError: as that function; also ``ValueError`` if ``query`` and ``key`` share elements.
            They may be parts of one fused projection.
    """
    _rope_with_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)
