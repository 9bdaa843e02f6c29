"""All-reduce over a workspace, alone and with residual and RMSNorm."""

from __future__ import annotations

import torch

from .._ops.declare import define
from .._ops.errors import value_error
from .._ops.route import without_gradient
from .._ops.tensors import check_tensor
from ..errors import GroupError, UnsupportedError
from ..jit.modules.allreduce import gen_allreduce_module
from .trtllm_ar import AllReduceFusionPattern
from .workspace import TRTLLMAllReduceFusionWorkspace

__all__ = ["allreduce_fusion", "gen_allreduce_module"]


_allreduce = define(
    "allreduce(Tensor input, Tensor? residual_in, Tensor? weight, Tensor(a!)? out, Tensor(b!)? residual_out,"
    " Tensor(c!)? norm_out, Tensor(d!) order, Tensor table, float eps, float weight_bias, bool? enable_pdl) -> ()",
    gen_allreduce_module,
    general=without_gradient("allreduce", "input", "residual_in", "weight"),
    on_host=("table",),
)


def allreduce_fusion(
    input: torch.Tensor,
    workspace: TRTLLMAllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """Sum ``input`` over the ranks of a workspace, and add the residual and normalise on request.

    All ranks make the same calls in the same order. The sum is in float32 in the order of ranks, rounded once,
    so all ranks get the same bits, and a row has the same bits in every batch, in a graph and with or without
    the norm. With the norm::

        residual_out = sum + residual_in
        norm_out = residual_out / sqrt(mean(residual_out ** 2) + rms_eps) * (rms_gamma + weight_bias)

    where the norm reads the float32 value of ``residual_out``.

    Args:
        input: ``[tokens, hidden]``, contiguous, float32, float16 or bfloat16. Shape and dtype are equal on all
            ranks, and the workspace is on its device.
        workspace: of :func:`create_allreduce_fusion_workspace`.
        pattern: ``AllReduceFusionPattern.kAllReduce`` or ``kARResidualRMSNorm``.
        launch_with_pdl: let the kernel start before the one before it ends, on Hopper and newer.
        output: like ``input``: the sum. With the norm it is optional, without it is allocated by default.
        residual_out, norm_out: like ``input``, allocated by default. Each output may be ``input`` or
            ``residual_in`` itself, and overlaps no other output.
        residual_in: like ``input``, and equal on all ranks. Required by the norm, as is ``rms_gamma``.
        rms_gamma: ``[hidden]``, of ``input``'s dtype.
        rms_eps: added to the mean of squares.
        weight_bias: added to ``rms_gamma``: 1 for Gemma.
        trigger_completion_at_end, use_oneshot, fp32_acc, layout_code: change no result and are ignored.

    Other arguments belong to patterns that are not served.

    Returns:
        ``norm_out``, or the sum for ``kAllReduce``.

    Raises:
        ValueError: invalid shapes or devices, an input that does not fit, partial overlap, a missing tensor,
            a destroyed workspace, or an unknown pattern. Nothing was sent.
        TypeError: invalid dtypes.
        UnsupportedError: a pattern with quantisation or experts.
        GroupError: an earlier call of the workspace failed, see ``workspace.check()``. On the CPU, this call.
        GradientError: a tensor requires a gradient.
    """
    check_tensor("allreduce_fusion", "input", input)
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise TypeError(
            f"allreduce_fusion: workspace: got {type(workspace).__name__}, wanted TRTLLMAllReduceFusionWorkspace"
        )
    result: torch.Tensor
    if pattern == AllReduceFusionPattern.kAllReduce:
        result = output = torch.empty_like(input) if output is None else output
        residual_in = rms_gamma = residual_out = norm_out = None
    elif pattern == AllReduceFusionPattern.kARResidualRMSNorm:
        if rms_gamma is None:
            raise value_error("allreduce_fusion", "rms_gamma", None, "a tensor")
        residual_out = torch.empty_like(input) if residual_out is None else residual_out
        result = norm_out = torch.empty_like(input) if norm_out is None else norm_out
    else:
        name = AllReduceFusionPattern(pattern).name
        raise UnsupportedError(f"allreduce_fusion: pattern: got {name}, wanted kAllReduce or kARResidualRMSNorm")
    try:
        _allreduce(
            input,
            residual_in,
            rms_gamma,
            output,
            residual_out,
            norm_out,
            workspace._order,
            workspace._table,
            rms_eps,
            weight_bias,
            launch_with_pdl,
        )
    except GroupError:
        workspace.check()  # has the reason
        raise
    return result
