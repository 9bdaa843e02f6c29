"""Sums over the experts of each token, before an all-reduce: one kernel of the experts' family."""

from __future__ import annotations

import torch

from .._ops.errors import type_error, value_error
from .._ops.tensors import check_dims, check_tensor
from ..fused_moe.operators import finalize


def finalized(
    op: str,
    input: torch.Tensor,
    rows: torch.Tensor | None,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``sum over j of scales[t, j] * input[rows[t, j]]``, plus ``shared[t]``, for each token.

    The sum is in float32 in the order of ``j``, and rounded once. Negative rows add nothing.
    """
    check_dims(op, "input", input, 2)
    if rows is None:
        raise value_error(op, "expanded_idx_to_permuted_idx", None, "a tensor")
    check_dims(op, "expanded_idx_to_permuted_idx", rows, 2)
    if rows.dtype != torch.int32:
        raise type_error(op, "expanded_idx_to_permuted_idx", rows.dtype, "int32")
    if scales is not None:
        _check_shape(op, "expert_scale_factor", scales, (rows.shape[0], rows.shape[1]))
        scales = scales.float().contiguous()
    return _summed(op, "shared_expert_output", input, rows.contiguous(), scales, shared)


def reduced(
    op: str,
    tokens: torch.Tensor,
    experts: int | None,
    scales: torch.Tensor | None,
    active: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``sum over e of scales[e, t] * active[e, t]``, plus ``tokens[t]``, for each token.

    ``scales`` and ``active`` have any shape with the elements of ``[experts, tokens]`` and
    ``[experts, tokens, hidden]``. The sum is in float32 in the order of experts, and rounded once.
    """
    check_dims(op, "input", tokens, 2)
    if experts is None or experts < 1:
        raise value_error(op, "moe_reduction_device_num_experts", experts, "a positive number")
    count, hidden = tokens.shape
    for name, tensor, wanted in (
        ("moe_reduction_scale_input", scales, experts * count),
        ("moe_reduction_active_experts_token_input", active, experts * count * hidden),
    ):
        if tensor is None:
            raise value_error(op, name, None, "a tensor")
        check_tensor(op, name, tensor)
        if tensor.numel() != wanted or not tensor.is_contiguous():
            raise value_error(op, name, f"shape {list(tensor.shape)}", f"{wanted} contiguous elements")
    assert scales is not None and active is not None
    rows = torch.arange(experts * count, dtype=torch.int32, device=tokens.device).view(experts, count).T
    weights = scales.view(experts, count).T.float()
    inputs = active.view(experts * count, hidden)
    return _summed(op, "input", inputs, rows.contiguous(), weights.contiguous(), tokens)


def _summed(
    op: str,
    name: str,
    input: torch.Tensor,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    shape = (rows.shape[0], input.shape[1])
    if shared is None:
        out = input.new_empty(shape)
        finalize(out, input, rows, scales, None, None)
        return out
    _check_shape(op, name, shared, shape)
    if shared.dtype != input.dtype:
        raise type_error(op, name, shared.dtype, f"{input.dtype} as the experts' rows have")
    total = input.new_empty(shape, dtype=torch.float32)
    finalize(total, input, rows, scales, None, None)
    return total.add_(shared).to(input.dtype)


def _check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    check_tensor(op, name, tensor)
    if tuple(tensor.shape) != shape:
        raise value_error(op, name, f"shape {list(tensor.shape)}", list(shape))
