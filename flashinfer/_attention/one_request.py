"""Attention of one request without a plan: in eager programs, and as operators that graphs do not trace into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.declare import define_in_python
from .._ops.dtypes import is_fp8
from .._ops.scalars import numbers_of
from .arguments import NON_CAUSAL, Logits, as_kernel_input, layout_of, no_gradient, slopes_of, variant_of
from .kernels import kernels_of_request
from .operators import Operators, builtin_operators, call, mode_of_variant, operators_of_module, public_error
from .scales import NO_SCALES, Scale, head_scales, output_dtype, scaled_query, value_scale
from .signature import CallArguments, Parameters, schema_of


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
    """Return the output of one request and, with ``return_lse``, the lse of every row.

    ``q`` has three dimensions.
    """
    no_gradient(op, (q, k, v))
    layout = layout_of(op, kv_layout)
    factor, o_scale, by_head, scale_output = 1.0, 1.0, None, None
    if scales != NO_SCALES and is_fp8(q.dtype):
        factor, o_scale, by_head = head_scales(op, scales, q.shape[1], k.shape[1 - layout], q.device)
    elif scales != NO_SCALES:
        num_kv_heads = k.shape[1 - layout]
        q, factor = scaled_query(op, q, num_kv_heads, *scales[:2])
        o_scale, scale_output = value_scale(op, scales[2], q.shape[1], num_kv_heads, q.device)
    out, lse = _results(q, v, o_dtype or output_dtype(q.dtype), return_lse)
    arguments = CallArguments(
        custom_mask=packed_mask,
        kv_layout=layout,
        mask_mode=mask_mode,
        window_left=logits.window_left,
        o_scale=o_scale,
        rope_scale=logits.rope_scale,
        rope_theta=logits.rope_theta,
        variant=variant_of(logits),
    )
    slopes = slopes_of(logits, q.shape[1], q.device)
    if is_compiling():  # includes torch.export without Dynamo
        numbers = numbers_of(logits[2:], factor, q.device)
        parameters = Parameters(slopes, numbers, by_head, None, 1.0, 1.0)
        if numbers is None:
            parameters = Parameters(slopes, None, by_head, None, logits.sm_scale * factor, logits.logits_soft_cap)
        else:
            arguments = arguments._replace(rope_scale=1.0, rope_theta=1.0)
        torch.ops.flashinfer.attend(family, op, backend, q, k, v, out, lse, *arguments, *parameters)
    else:
        _attend(
            family,
            op,
            backend,
            q,
            k,
            v,
            out,
            lse,
            *arguments,
            slopes,
            None,
            by_head,
            None,
            logits.sm_scale * factor,
            logits.logits_soft_cap,
        )
    if scale_output is not None:
        scale_output(out)
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
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *arguments_and_parameters: Any,
) -> None:
    dtypes, head_dims = (q.dtype, k.dtype, out.dtype), (q.shape[2], v.shape[2])
    arguments = CallArguments(*arguments_and_parameters[: len(CallArguments._fields)])
    mode, capped = mode_of_variant(arguments.variant)
    layout, mask_mode = arguments.kv_layout, arguments.mask_mode
    try:
        kernels = kernels_of_request(backend, family, q, k, v, layout, mask_mode, mode, capped, out.dtype)
        operators = builtin_operators(family, q.device.type, dtypes, head_dims, arguments.variant, kernels)
    except ValueError as err:
        raise public_error(op, err) from None
    call(
        op,
        operators.run,
        as_kernel_input(q),
        as_kernel_input(k),
        as_kernel_input(v),
        out,
        lse,
        *arguments_and_parameters,
    )


# Tracing cannot select a module: sizes may be symbolic, and the module may need a build. This operator selects it at
# run time, when the sizes are known.
define_in_python(
    "attend(str family, str op, str backend, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse,"
    f" {schema_of(CallArguments, 'SymInt')}, {schema_of(Parameters)}) -> ()",
    _attend,
)


def run_one(
    op: str,
    operators: Operators,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    window_left: int,
    parameters: Sequence[Any],
    mask_mode: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of one request by a user's variant."""
    no_gradient(op, (q, k, v, *parameters))
    out, lse = _results(q, v, q.dtype, return_lse)
    if is_dynamo_compiling():
        tensors = [x for x in parameters if x is None or isinstance(x, torch.Tensor)]
        torch.ops.flashinfer.attend_custom(
            operators.module, op, q, k, v, out, lse, layout, mask_mode, window_left, tensors, parameters[len(tensors) :]
        )
    else:
        _call_custom(op, operators, q, k, v, out, lse, layout, mask_mode, window_left, parameters)
    return out, lse


def _call_custom(
    op: str,
    operators: Operators,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: int,
    mask_mode: int,
    window_left: int,
    parameters: Sequence[Any],
) -> None:
    arguments = CallArguments(kv_layout=layout, mask_mode=mask_mode, window_left=window_left)
    call(
        op, operators.run, as_kernel_input(q), as_kernel_input(k), as_kernel_input(v), out, lse, *arguments, *parameters
    )


def _attend_custom(
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
    _call_custom(op, operators, q, k, v, out, lse, layout, mask_mode, window_left, (*tensors, *scalars))


define_in_python(
    "attend_custom(str module, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, int layout,"
    " int mask_mode, SymInt window_left, Tensor?[] tensors, Scalar[] scalars) -> ()",
    _attend_custom,
)
