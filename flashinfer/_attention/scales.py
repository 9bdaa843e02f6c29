"""Scales of quantised values. Numbers become factors of the kernels. The host never reads a tensor of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.dtypes import is_fp8
from .._ops.numbers import check_real, real
from .._ops.scalars import as_tensor, is_symbolic

Scale = float | torch.Tensor | None
NO_SCALES: tuple[Scale, Scale, Scale] = (None, None, None)


def output_dtype(query: torch.dtype) -> torch.dtype:
    """Return the default output dtype: the query's, or float16 for queries of 8 bits."""
    return torch.float16 if is_fp8(query) else query


def scaled_query(
    op: str, q: torch.Tensor, num_kv_heads: int, q_scale: Scale, k_scale: Scale
) -> tuple[torch.Tensor, float]:
    """Apply both scales. Return the query and a factor of the logits.

    A number multiplies the factor. A tensor on a device multiplies the query, because the host must not read it. In a
    graph, a tensor of one element multiplies the factor too, through ``numbers_of()``.
    """
    factor: Any = 1.0
    for name, scale, heads in (("q", q_scale, q.shape[-2]), ("k", k_scale, num_kv_heads)):
        number = _number(op, name, scale, heads, q.device)
        if isinstance(number, float):
            factor *= number
        elif is_dynamo_compiling() and number.dim() == 0:
            factor = number.to(q.device, torch.float64) * factor
        else:
            per_head = number.repeat_interleave(q.shape[-2] // max(heads, 1)) if number.dim() else number
            q = (q * per_head.to(q.device, torch.float32).unsqueeze(-1)).to(q.dtype)
    return q, factor


def head_scales(
    op: str, scales: tuple[Scale, Scale, Scale], num_qo_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[float, float, torch.Tensor | None]:
    """Return the scales of 8-bit queries, keys and values as factors of logits and outputs.

    Returns:
        A factor of the logits, a factor of the output, and ``None``. If a scale is a tensor, both factors are
        1 and the third result is ``[2, num_qo_heads]``: the two factors for each query head.
    """
    heads = (num_qo_heads, num_kv_heads, num_kv_heads)
    numbers = [_number(op, name, scale, n, device) for name, scale, n in zip("qkv", scales, heads, strict=True)]
    by_group = (num_kv_heads, num_qo_heads // max(num_kv_heads, 1))
    if by_group[0] * by_group[1] != num_qo_heads:
        return 1.0, 1.0, None  # the operator raises the error

    def on_device(number: float | torch.Tensor, *shape: int) -> float | torch.Tensor:
        if isinstance(number, float):
            return number
        return number.to(device, torch.float32).view(shape if number.dim() else ())

    q, k, v = (on_device(number, num_kv_heads, -1) for number in numbers)
    if isinstance(q, float) and isinstance(k, float) and isinstance(v, float):
        return q * k, v, None

    def spread(number: float | torch.Tensor) -> torch.Tensor:
        return (torch.full((), number, device=device) if isinstance(number, float) else number).expand(by_group)

    return 1.0, 1.0, torch.stack([spread(q * k), spread(v)]).view(2, num_qo_heads)


def _argument(op: str, name: str) -> str:
    """Return the public argument's name for the scale of ``q``, ``k`` or ``v``."""
    is_older = op.startswith(("single_prefill_with_kv_cache", "BlockSparseAttentionWrapper"))
    return f"scale_{name}" if is_older else f"{name}_scale"


def _number(op: str, name: str, scale: Scale, heads: int, device: torch.device) -> float | torch.Tensor:
    if scale is None:
        return 1.0
    if not isinstance(scale, torch.Tensor):
        number = scale if type(scale) is float else real(op, _argument(op, name), scale)
        # torch 2.11 would compile a product of numbers, or an operator's argument, into the graph as a constant.
        return as_tensor(number, device) if is_dynamo_compiling() and is_symbolic(number) else number
    check_real(op, _argument(op, name), scale)
    if scale.numel() == 1:
        return float(scale) if scale.device.type == "cpu" and not is_dynamo_compiling() else scale.reshape(())
    if tuple(scale.shape) != (heads,):
        got = list(scale.shape)
        raise ValueError(f"{op}: {_argument(op, name)}: got shape {got}, wanted one number or [{heads}]")
    return scale


def value_scale(
    op: str, v_scale: Scale, num_qo_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[float, Callable[[torch.Tensor], None] | None]:
    """Return a factor for the kernel's output, and a function to apply to the output or ``None``."""
    number = _number(op, "v", v_scale, num_kv_heads, device)
    if isinstance(number, float):
        return number, None
    per_head = number.repeat_interleave(num_qo_heads // max(num_kv_heads, 1)) if number.dim() else number

    def multiply(out: torch.Tensor) -> None:
        out.copy_(out * per_head.to(out.device, torch.float32).unsqueeze(-1))

    return 1.0, multiply
