"""All-reduce and the operations that follow it in one call, with the outputs as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._ops.errors import value_error
from ..._ops.tensors import check_dims, check_tensor
from ...errors import UnsupportedError
from .._codes import AllReduceFusionPattern
from ..allreduce import GROUP, NORM_PATTERNS, TOKEN, allreduce_fusion
from .tensors import as_fp8, as_rows, required
from .workspaces import check_group, find_workspace


def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: AllReduceFusionPattern,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """Call :func:`allreduce_fusion` on flat tensors. The caller passes all outputs.

    Args:
        allreduce_in, allreduce_out, residual_in, residual_out, norm_out: contiguous, with ``token_num * hidden_dim``
            elements in any shape.
        world_size, world_rank: as the workspace has.
        token_num, hidden_dim: shape of the input.
        workspace_ptrs: the tensor of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` itself.
        pattern_code: of :class:`AllReduceFusionPattern`. Every output that it writes is required, except
            ``residual_out``.
        quant_out: contiguous memory of any dtype. The result is written to its first bytes as ``float8_e4m3fn``.
        metadata: the workspace's sizes. A call that does not fit them is refused.
        rms_eps, weight_bias: by default 1e-6 and 0.

    Other arguments are those of :func:`allreduce_fusion`.

    Raises:
        ValueError: a missing output, invalid sizes, or an unknown workspace, and errors of :func:`allreduce_fusion`.
        TypeError, UnsupportedError, GroupError: as :func:`allreduce_fusion` does.
    """
    op = "trtllm_allreduce_fusion"
    check_tensor(op, "workspace_ptrs", workspace_ptrs)
    workspace = find_workspace(op, "workspace_ptrs", workspace_ptrs.data_ptr())
    check_group(op, workspace, world_size, world_rank)
    if metadata is not None:
        check_metadata(op, metadata, world_size, world_rank, token_num, hidden_dim, allreduce_in)
    pattern = AllReduceFusionPattern(pattern_code)
    check_outputs(op, pattern, allreduce_out, norm_out, quant_out, scale_out)

    def shaped(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else as_rows(op, name, tensor, token_num, hidden_dim)

    allreduce_fusion(
        as_rows(op, "allreduce_in", allreduce_in, token_num, hidden_dim),
        workspace,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output=shaped("allreduce_out", allreduce_out),
        residual_out=shaped("residual_out", residual_out),
        norm_out=shaped("norm_out", norm_out),
        quant_out=None if quant_out is None else as_fp8(op, quant_out, token_num, hidden_dim),
        scale_out=scale_out,
        residual_in=shaped("residual_in", residual_in),
        rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias or 0.0,
    )


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: float,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor,
    layout_code: int | None,
    moe_allreduce_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
) -> None:
    """Add the experts of each token, then sum over the ranks and normalise, in flat tensors.

    Args:
        world_size, world_rank: as the workspace has.
        token_num, hidden_dim: shape of the outputs.
        workspace_ptrs: the tensor of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` itself.
        moe_allreduce_out: receives the sum over the ranks, optional.
        norm_out: required.
        residual_out: optional.
        scale_factor, layout_code: ignored without ``quant_out``.
        quant_out, scale_out: FP4 outputs, which must be ``None``.

    Other arguments are those of :func:`allreduce_fusion`.

    Raises:
        ValueError: invalid sizes or an unknown workspace, and errors of :func:`allreduce_fusion`.
        TypeError, GroupError: as :func:`allreduce_fusion` does.
        UnsupportedError: an FP4 output.
    """
    op = "trtllm_moe_allreduce_fusion"
    rows = as_rows(op, "moe_reduction_token_input", moe_reduction_token_input, token_num, hidden_dim)
    _refuse_fp4(op, quant_out, scale_out)
    _fuse_experts(
        op,
        AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
        rows,
        (world_size, world_rank, token_num, hidden_dim),
        workspace_ptrs,
        launch_with_pdl,
        {
            "output": moe_allreduce_out,
            "residual_in": residual_in,
            "residual_out": residual_out,
            "norm_out": required(op, "norm_out", norm_out),
        },
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        moe_reduction_device_num_experts=moe_reduction_device_num_experts,
        moe_reduction_scale_input=moe_reduction_scale_input,
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
    )


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: torch.Tensor,
    residual_out: torch.Tensor,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: torch.Tensor | None,
    expert_scale_factor: torch.Tensor | None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> None:
    """Add the experts' rows of each token, then sum over the ranks and normalise.

    Args:
        allreduce_in: ``[..., hidden]``, contiguous: the experts' rows.
        residual_in, residual_out, norm_out: ``[tokens, hidden]``.
        norm_weight, eps: ``rms_gamma`` and ``rms_eps`` of :func:`allreduce_fusion`.
        workspace_ptrs: the tensor of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` itself.
        world_rank, world_size: as the workspace has.
        quant_out, scale_out: FP4 outputs, which must be ``None``.
        routed_scaling_factor: multiplies ``expert_scale_factor``, by default 1.

    Other arguments are those of :func:`allreduce_fusion`.

    Raises:
        ValueError: invalid sizes or an unknown workspace, and errors of :func:`allreduce_fusion`.
        TypeError, GroupError: as :func:`allreduce_fusion` does.
        UnsupportedError: an FP4 output.
    """
    op = "trtllm_moe_finalize_allreduce_fusion"
    _refuse_fp4(op, quant_out, scale_out)
    check_dims(op, "residual_in", residual_in, 2)
    check_tensor(op, "allreduce_in", allreduce_in)
    tokens, hidden = residual_in.shape
    rows = allreduce_in.numel() // max(1, hidden)
    if routed_scaling_factor is not None:
        if expert_scale_factor is None:
            check_tensor(op, "expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx)
            expert_scale_factor = residual_in.new_ones(expanded_idx_to_permuted_idx.shape, dtype=torch.float32)
        check_tensor(op, "expert_scale_factor", expert_scale_factor)
        expert_scale_factor = expert_scale_factor.float() * routed_scaling_factor
    _fuse_experts(
        op,
        AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        as_rows(op, "allreduce_in", allreduce_in, rows, hidden),
        (world_size, world_rank, tokens, hidden),
        workspace_ptrs,
        launch_with_pdl,
        {"residual_in": residual_in, "residual_out": residual_out, "norm_out": norm_out},
        rms_gamma=norm_weight,
        rms_eps=eps,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor,
        shared_expert_output=shared_expert_output,
    )


def _refuse_fp4(op: str, quant_out: torch.Tensor | None, scale_out: torch.Tensor | None) -> None:
    if quant_out is not None or scale_out is not None:
        raise UnsupportedError(f"{op}: quant_out: got a tensor, wanted None: there are no FP4 outputs")


def _fuse_experts(
    op: str,
    pattern: AllReduceFusionPattern,
    x: torch.Tensor,
    sizes: tuple[int, int, int, int],
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    flat: dict[str, torch.Tensor | None],
    **options: Any,
) -> None:
    """Call :func:`allreduce_fusion` with tensors of any shape. ``sizes`` are ranks, rank, tokens and columns."""
    size, rank, tokens, hidden = sizes
    check_tensor(op, "workspace_ptrs", workspace_ptrs)
    workspace = find_workspace(op, "workspace_ptrs", workspace_ptrs.data_ptr())
    check_group(op, workspace, size, rank)
    shaped: dict[str, Any] = {
        name: None if tensor is None else as_rows(op, name, tensor, tokens, hidden) for name, tensor in flat.items()
    }
    allreduce_fusion(x, workspace, pattern, launch_with_pdl, **shaped, **options)


def check_metadata(
    op: str, metadata: dict[str, Any], size: int, rank: int, tokens: int, hidden: int, x: torch.Tensor
) -> None:
    """Check that a call fits the sizes of its workspace."""
    is_fp32 = x.dtype == torch.float32
    checks: tuple[tuple[str, Any, Callable[[Any], bool]], ...] = (
        ("tp_size", size, lambda limit: size == limit),
        ("tp_rank", rank, lambda limit: rank == limit),
        ("max_token_num", tokens, lambda limit: tokens <= limit),
        ("hidden_dim", hidden, lambda limit: hidden == limit),
        ("use_fp32_lamport", is_fp32, lambda limit: is_fp32 == limit),
    )
    for name, got, fits in checks:
        if not fits(metadata[name]):
            raise value_error(op, f"metadata[{name!r}]", f"{metadata[name]} with {got} of the call", "sizes that fit")


def check_outputs(
    op: str,
    pattern: AllReduceFusionPattern,
    allreduce_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
) -> None:
    """Check that the caller passes every output of the pattern, because the public functions return none."""
    quant, has_norm = NORM_PATTERNS.get(pattern, (0, False))
    outputs = {
        "allreduce_out": (pattern == AllReduceFusionPattern.kAllReduce, allreduce_out),
        "norm_out": (has_norm, norm_out),
        "quant_out": (quant != 0, quant_out),
        "scale_out": (quant in (TOKEN, GROUP), scale_out),
    }
    for name, (is_required, tensor) in outputs.items():
        if is_required:
            required(op, name, tensor)
