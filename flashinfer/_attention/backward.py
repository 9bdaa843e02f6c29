"""Gradients of attention: the operators, and the functions that make a call differentiable.

The forward pass is the same as in inference. An operator after it connects its result to the gradients, which
recompute ``P`` from the lse: ``dV = P^T dO``, ``dS = P * (dO V^T - delta)``, ``dQ = dS K``, ``dK = dS^T Q``,
``delta = rowsum(dO * O) - d(lse) / ln 2``.

Source: Dao: FlashAttention-2, 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import is_grad_enabled

from .._ops.declare import define, define_in_python
from .._ops.dtypes import is_fp8
from .._ops.numbers import check_multiple, check_option, check_range
from .._ops.route import Gradient, no_second_derivative, write
from .._ops.scalars import numbers_of
from .._ops.shapes import check_tensors
from ..errors import GradientError
from ..jit.modules.prefill_backward import MAX_CUDA_HEAD_DIM, gen_prefill_backward_module
from .arguments import CUSTOM, MULTI_ITEM, Logits, as_kernel_input, layout_of, slopes_of
from .one_request import attend_one
from .reference import LOG2E, CallOptions, attend, gradients, requests_of, rotated, work_dtype
from .scales import NO_SCALES, Scale

_CALL_SCHEMA = (
    "Tensor? qo_indptr, Tensor? kv_lens, Tensor? packed_mask, Tensor? numbers, int layout, int mask_mode,"
    " SymInt window_left, int pos_encoding_mode, float logits_soft_cap, float sm_scale, float rope_scale,"
    " float rope_theta"
)
# Bytes of smem that the CUDA kernels need for the largest heads. Compute capabilities 8.0, 9.0 and 10.0 have enough.
KERNEL_SHARED_MEMORY = 145 << 10


def _options(numbers: torch.Tensor | None, layout: int, mask_mode: int, *rest: Any) -> CallOptions:
    """Return the options of a call.

    In a graph the last four options are symbolic. The host tensor ``numbers`` then contains their values.
    """
    if numbers is not None:
        scale, cap, *rope = numbers.tolist()
        rest = (*rest[:2], cap, scale, *rope)
    return CallOptions(layout, mask_mode, *rest)


def _slopes(q: torch.Tensor, options: CallOptions) -> torch.Tensor | None:
    return slopes_of(Logits(options.pos_encoding_mode, -1, 0.0, 1.0, 1.0, 1.0), q.shape[1], q.device)


def _kernel_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_kernel = define(
    "prefill_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, Tensor grad_lse,"
    " Tensor? qo_indptr, Tensor? kv_lens, Tensor? packed_mask, Tensor? alibi_slopes, int layout, int mask_mode,"
    " int window_left, float logits_soft_cap, float sm_scale) -> (Tensor, Tensor, Tensor)",
    gen_prefill_backward_module,
    _kernel_fake,
    gradient=no_second_derivative("prefill_backward"),
    on_host=("qo_indptr", "kv_lens"),
)


def _shared_memory(device: torch.device) -> int:
    """Return the largest smem of a CTA, in bytes."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return True if a kernel computes these gradients. The CPU kernel converts mixed dtypes to float32."""
    if q.is_cpu:
        return work_dtype(q.dtype) == torch.float32
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and all(x.dtype == q.dtype for x in (k, v, out, grad))
        and all(x.shape[2] <= MAX_CUDA_HEAD_DIM and x.shape[2] % 8 == 0 for x in (q, v))
        and _shared_memory(q.device) >= KERNEL_SHARED_MEMORY
    )


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    inputs = q, k, v
    options, work = _options(*rest), work_dtype(q.dtype)
    requests = requests_of(q, k, options.layout, qo_indptr, kv_lens)
    if options.rope:
        q = rotated(q.to(work), requests, False, options)
        k = _by_tokens(rotated(_by_tokens(k.to(work), options), requests, True, options), options)
    slopes = _slopes(q, options)
    if _has_kernel(q, k, v, out, grad):
        if q.is_cpu and any(x.dtype != q.dtype for x in (k, v, out, grad)):
            q, k, v, out, grad = (x.float() for x in (q, k, v, out, grad))
        q, k, v, out, grad = (as_kernel_input(x) for x in (q, k, v, out, grad))
        results = _kernel(
            q, k, v, out, lse, grad, grad_lse.float().contiguous(), qo_indptr, kv_lens, packed_mask, slopes,
            options.layout, options.mask_mode, options.window_left, options.logits_soft_cap, options.sm_scale,
        )  # fmt: skip
    else:
        # Multiply by log2(e), because the lse is in base 2.
        delta = (out.to(work) * grad.to(work)).sum(-1).sub_(grad_lse.to(work), alpha=LOG2E)
        results = gradients(q, k, v, grad, delta, lse, requests, options, packed_mask, slopes)
    dq, dk, dv = results
    if options.rope:
        dq = rotated(dq, requests, False, options, back=True)
        dk = _by_tokens(rotated(_by_tokens(dk, options), requests, True, options, back=True), options)
    return tuple(x.to(like.dtype).contiguous() for x, like in zip((dq, dk, dv), inputs, strict=True))


def _by_tokens(x: torch.Tensor, options: CallOptions) -> torch.Tensor:
    return x.transpose(0, 1) if options.layout else x


_backward = define_in_python(
    "prefill_gradients(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, Tensor grad_lse,"
    f" {_CALL_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _kernel_fake,
    gradient=no_second_derivative("attention"),
    on_host=("qo_indptr", "kv_lens", "numbers"),
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    qo_indptr: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is not None and lse is not None:
        return out.clone(), lse.clone()  # an operator of torch must not return its inputs
    options = _options(*rest)
    requests = requests_of(q, k, options.layout, qo_indptr, kv_lens)
    if options.rope:
        q = rotated(q, requests, False, options)
        k = _by_tokens(rotated(_by_tokens(k, options), requests, True, options), options)
    return attend(q, k, v, requests, options, packed_mask, _slopes(q, options))


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q.shape[:2]
    if out is not None and lse is not None:
        return out.new_empty(out.shape), lse.new_empty(lse.shape)
    work = work_dtype(q.dtype)
    return q.new_empty((*rows, v.shape[2]), dtype=work), q.new_empty(rows, dtype=work)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, _, _, qo_indptr, kv_lens, packed_mask, numbers, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, qo_indptr, kv_lens, packed_mask, numbers)


def _gradients_of(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *tables = ctx.saved_tensors
    return *_backward(q, k, v, out, lse, grad, grad_lse, *tables, *ctx.rest), *[None] * (6 + len(ctx.rest))


_autograd = define_in_python(
    f"prefill_autograd(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse, {_CALL_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    gradient=Gradient(_save, _gradients_of),
    on_host=("qo_indptr", "kv_lens", "numbers"),
)


def needs_differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if a call needs :func:`differentiable`: for a gradient, or for float64 on the CPU."""
    return (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) or (
        q.dtype is torch.float64 and q.is_cpu
    )


def refuse_gradient(op: str, why: str) -> NoReturn:
    """Raise the error of a call that has no gradient."""
    raise GradientError(f"{op}: has no gradient {why}, or torch.no_grad()")


def check_differentiable(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int) -> None:
    """Check that these dtypes have gradients.

    Check all arguments of a float64 call, because inference operators, which check the others, do not run for it.
    """
    for name, x in (("k", k), ("v", v)):
        if is_fp8(x.dtype):
            refuse_gradient(op, f"with {name} of {x.dtype}: wanted float32, float16 or bfloat16")
    if torch.float64 not in (q.dtype, k.dtype, v.dtype):
        return
    rows = "h t" if layout else "t h"
    check_tensors(op, q=(q, "n g d"), k=(k, f"{rows} d", "q"), v=(v, f"{rows} _", "q"))
    check_range(op, "q", q.shape[1], 1, unit="heads")
    check_multiple(op, "q", q.shape[1], "the heads of k", k.shape[1 - layout])


def differentiable(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    infer: Callable[[], Any],
    layout: int,
    mask_mode: int,
    logits: Logits,
    packed_mask: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse with their gradients.

    ``infer()`` returns both without gradients. It is not called for float64, which has no inference kernel. For a
    batch, ``qo_indptr`` and ``kv_lens`` are on the host.
    """
    if mask_mode == MULTI_ITEM:
        refuse_gradient(op, "with multi-item scoring: wanted a custom mask")
    check_differentiable(op, q, k, v, layout)
    out = lse = None
    if q.dtype != torch.float64:
        with torch.no_grad():
            out, lse = infer()
    mode, window_left, *four = logits
    numbers = numbers_of(four, 1.0, torch.device("cpu")) if torch.compiler.is_dynamo_compiling() else None
    if numbers is not None:
        four = [0.0, 0.0, 1.0, 1.0]
    return _autograd(  # type: ignore[no-any-return]
        q, k, v, out, lse, qo_indptr, kv_lens, packed_mask if mask_mode == CUSTOM else None, numbers, layout, mask_mode,
        window_left, mode, *four,
    )  # fmt: skip


def differentiable_single(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    logits: Logits,
    scales: tuple[Scale, Scale, Scale],
    o_dtype: torch.dtype | None,
    mask_mode: int,
    packed_mask: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute one request whose arguments :func:`flashinfer.single_prefill_with_kv_cache` has checked."""
    if scales != NO_SCALES:
        refuse_gradient(
            op, "with scale_q, scale_k or scale_v: wanted them multiplied into q, into sm_scale or into the result"
        )
    if q.dtype == torch.float64:
        check_option(op, "o_dtype", o_dtype, (None, q.dtype), " as q has")

    def infer() -> tuple[torch.Tensor, torch.Tensor | None]:
        return attend_one(
            "prefill", op, q, k, v, kv_layout, logits, NO_SCALES, o_dtype, mask_mode, packed_mask, return_lse=True
        )

    computed = differentiable(op, q, k, v, infer, layout_of(op, kv_layout), mask_mode, logits, packed_mask)
    return computed if return_lse else computed[0]


def write_results(
    op: str,
    computed: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the results of a call, after writing them to the caller's ``out`` and ``lse``."""
    if out is not None:
        write(op, "out", out, computed[0])
    if lse is not None:
        write(op, "lse", lse, computed[1])
    first = computed[0] if out is None else out
    return (first, computed[1] if lse is None else lse) if return_lse else first
