"""Attention of one request, without a plan: in eager programs, and as operators that torch does not look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.declare import define_in_python
from .._ops.scalars import numbers_of
from .arguments import (
    NO_SCALES,
    NON_CAUSAL,
    ONE_REQUEST,
    Logits,
    Operators,
    Scale,
    call,
    layout_of,
    no_gradient,
    operators_of_module,
    own_operators,
    rows_of,
    scaled_query,
    slopes_of,
    value_scale,
)
from .kernels import kernels_of_one


def attend_one(
    family: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    logits: Logits,
    scales: tuple[Scale, Scale, Scale] = NO_SCALES,
    o_dtype: torch.dtype | None = None,
    mask_mode: int = NON_CAUSAL,
    packed_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one request, ``q`` of three dimensions: the output and, where it is wanted, the lse of every row."""
    no_gradient(op, (q, k, v))
    layout = layout_of(op, kv_layout)
    factor, o_scale, finish = 1.0, 1.0, None
    if scales != NO_SCALES:
        num_kv_heads = k.shape[1 - layout]
        q, factor = scaled_query(op, q, num_kv_heads, *scales[:2])
        o_scale, finish = value_scale(op, scales[2], q.shape[1], num_kv_heads, q.device)
    out, lse = _results(q, v, o_dtype or q.dtype, return_lse)
    if is_compiling():  # by torch.export without Dynamo, too
        slopes = slopes_of(logits, q.shape[1], q.device)
        numbers = numbers_of(logits[2:], factor, q.device)
        cap, *rest = logits[2:] if numbers is None else (1.0 if logits.logits_soft_cap > 0 else 0.0, 1.0, 1.0, 1.0)
        torch.ops.flashinfer.attend(
            family, op, q, k, v, out, lse, packed_mask, layout, mask_mode, *logits[:2], cap, *rest,
            factor if numbers is None else 1.0, o_scale, slopes, numbers, backend,
        )  # fmt: skip
    else:
        _attend(
            family, op, q, k, v, out, lse, packed_mask, layout, mask_mode, *logits, factor, o_scale, backend=backend
        )
    if finish is not None:
        finish(out)
    return out, lse


def _results(
    q: torch.Tensor, v: torch.Tensor, o_dtype: torch.dtype, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, heads, _ = q.shape
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    return torch.empty((tokens, heads, v.shape[2]), dtype=o_dtype, device=q.device), lse


def _attend(
    family: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    layout: int,
    mask_mode: int,
    pos_encoding_mode: int,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
    factor: float,
    o_scale: float,
    slopes: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    dtypes, head_dims = (q.dtype, k.dtype, out.dtype), (q.shape[2], v.shape[2])
    kernels = kernels_of_one(
        backend, family, q, k, v, layout, mask_mode, pos_encoding_mode, logits_soft_cap > 0, out.dtype
    )
    operators = own_operators(family, q.device.type, dtypes, head_dims, pos_encoding_mode, logits_soft_cap > 0, kernels)
    logits = Logits(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
    if slopes is None:
        slopes = slopes_of(logits, q.shape[1], q.device)
    parameters = (slopes, numbers, sm_scale * factor, logits_soft_cap)
    call_one(op, operators, q, k, v, out, lse, layout, logits, parameters, mask_mode, packed_mask, o_scale)


# In a traced function which module to call cannot be chosen: its key has sizes that may be symbols, and it may have to
# be built. An operator that torch does not look into chooses it when the sizes are there.
define_in_python(
    "attend(str family, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? packed_mask,"
    " int layout, int mask_mode, int pos_encoding_mode, SymInt window_left, float logits_soft_cap, float sm_scale,"
    " float rope_scale, float rope_theta, float factor, float o_scale, Tensor? slopes, Tensor? numbers,"
    ' str backend="auto") -> ()',
    _attend,
)


def run_one(
    op: str,
    operators: Operators,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    logits: Logits,
    parameters: Sequence[Any],
    mask_mode: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one request by a user's variant."""
    no_gradient(op, (q, k, v, *parameters))
    out, lse = _results(q, v, q.dtype, return_lse)
    if is_dynamo_compiling():
        tensors = [one for one in parameters if one is None or isinstance(one, torch.Tensor)]
        torch.ops.flashinfer.attend_own(
            operators.module, op, q, k, v, out, lse, layout, mask_mode, logits.window_left, tensors,
            parameters[len(tensors) :],
        )  # fmt: skip
    else:
        call_one(op, operators, q, k, v, out, lse, layout, logits, parameters, mask_mode, None, 1.0)
    return out, lse


def _attend_own(
    module: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: int,
    mask_mode: int,
    window_left: int,
    tensors: Sequence[torch.Tensor | None],
    scalars: Sequence[Any],
) -> None:
    operators = operators_of_module(op, getattr(torch.ops, module))
    logits = Logits(0, window_left, 0.0, 1.0, 1.0, 1e4)
    call_one(op, operators, q, k, v, out, lse, layout, logits, (*tensors, *scalars), mask_mode, None, 1.0)


define_in_python(
    "attend_own(str module, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, int layout,"
    " int mask_mode, SymInt window_left, Tensor?[] tensors, Scalar[] scalars) -> ()",
    _attend_own,
)


def call_one(
    op: str,
    operators: Operators,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: int,
    logits: Logits,
    parameters: Sequence[Any],
    mask_mode: int,
    packed_mask: torch.Tensor | None,
    o_scale: float,
) -> None:
    """Call the operator for one request, without a plan."""
    call(
        op, operators.run, rows_of(q), rows_of(k), rows_of(v), out, lse, *ONE_REQUEST[:10], packed_mask,
        *ONE_REQUEST[11:], layout, mask_mode, logits.window_left, o_scale, logits.rope_scale, logits.rope_theta,
        operators.variant, *parameters,
    )  # fmt: skip
