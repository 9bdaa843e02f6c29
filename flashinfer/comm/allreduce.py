"""All-reduce over a workspace, optionally fused with residual, RMSNorm and FP8 quantisation."""

from __future__ import annotations

import torch

from .._ops.declare import define
from .._ops.errors import value_error
from .._ops.route import without_gradient
from .._ops.scalars import scale_or_tensor
from .._ops.tensors import check_tensor
from ..errors import GroupError, UnsupportedError
from ..jit.modules.allreduce import gen_allreduce_module
from ._codes import AllReduceFusionPattern
from .workspace import TRTLLMAllReduceFusionWorkspace, check_workspace

__all__ = ["allreduce_fusion", "gen_allreduce_module"]

# Three operators, because each argument takes 0.1 us of the host.
_allreduce = define(
    "allreduce(Tensor input, Tensor(a!) out, Tensor(b!) order, Tensor table, int shots, bool? enable_pdl) -> ()",
    gen_allreduce_module,
    fallback=without_gradient("allreduce_fusion", "input"),
    on_host=("table",),
)
_allreduce_norm = define(
    "allreduce_norm(Tensor input, Tensor residual_in, Tensor weight, Tensor(a!)? out, Tensor(b!) residual_out,"
    " Tensor(c!) norm_out, Tensor(d!) order, Tensor table, float eps, float weight_bias, int shots,"
    " bool? enable_pdl) -> ()",
    gen_allreduce_module,
    fallback=without_gradient("allreduce_fusion", "input", "residual_in", "weight"),
    on_host=("table",),
)
_allreduce_norm_quant = define(
    "allreduce_norm_quant(Tensor input, Tensor residual_in, Tensor weight, Tensor(a!)? out, Tensor(b!) residual_out,"
    " Tensor(c!)? norm_out, Tensor(d!) quant_out, Tensor(e!)? scale_out, Tensor(f!) order, Tensor table, int quant,"
    " float scale, Tensor? scale_tensor, int group, float eps, float weight_bias, int shots, bool? enable_pdl) -> ()",
    gen_allreduce_module,
    fallback=without_gradient("allreduce_fusion", "input", "residual_in", "weight"),
    on_host=("table",),
)

STATIC, TOKEN, GROUP = 1, 2, 3  # NormQuant of common/allreduce.h
_SHOTS = 0  # 0: the kernel selects one or two shots by size. Tests set 1 or 2
# Pattern -> the quantisation, and whether norm_out is written too.
_Pattern = AllReduceFusionPattern
_SUM = _Pattern.kAllReduce
NORM_PATTERNS = {
    _Pattern.kARResidualRMSNorm: (0, True),
    _Pattern.kARResidualRMSNormFP8Quant: (STATIC, False),
    _Pattern.kARResidualRMSNormOutFP8Quant: (STATIC, True),
    _Pattern.kARResidualRMSNormDynamicFP8Quant: (TOKEN, False),
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant: (TOKEN, True),
    _Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: (GROUP, False),
    _Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: (GROUP, True),
}

# Pattern with a sum over experts -> the pattern of the all-reduce after it.
EXPERT_PATTERNS = {
    _Pattern.kMoEReductionARResidualRMSNorm: _Pattern.kARResidualRMSNorm,
    _Pattern.kMoEFinalizeARResidualRMSNorm: _Pattern.kARResidualRMSNorm,
    _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant: _Pattern.kARResidualRMSNormFP8Quant,
}


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
    """Sum ``input`` over the ranks of a workspace. Optionally add the residual, normalise and quantise.

    All ranks make the same calls in the same order. The sum is computed in float32 in the order of ranks, and rounded
    once. All ranks get the same bits. The bits of a row do not depend on the batch, on graphs or on the norm. With the
    norm::

        residual_out = sum + residual_in
        norm_out = residual_out / sqrt(mean(residual_out ** 2) + rms_eps) * (rms_gamma + weight_bias)

    where the norm reads the float32 value of ``residual_out``. Quantisation reads the norm as rounded to
    ``input``'s dtype, and clamps to the finite range of ``float8_e4m3fn``:

    - ``FP8Quant``: ``quant_out = norm * (1 / scale_factor)``;
    - ``DynamicFP8Quant``: ``quant_out = norm / scale``, where a row's scale is ``max(amax(row), 1 / 512) / 448``;
    - ``PerTokenGroupFP8PackedQuant``: the same for each group of columns, with the least power of two that is at
      least ``max(amax(group), 1e-10) / 448``. ``scale_out`` has its exponent plus 127.

    With ``Out`` in its name, a pattern also writes ``norm_out``.

    With experts, a kernel before the all-reduce adds the rows of each token in float32, and rounds the sum once:

    - ``MoEFinalize``: ``sum over j of expert_scale_factor[t, j] * input[expanded_idx_to_permuted_idx[t, j]]``, plus
      ``shared_expert_output[t]``;
    - ``MoEReduction``: ``sum over e of moe_reduction_scale_input[e, t] *
      moe_reduction_active_experts_token_input[e, t]``, plus ``input[t]``.

    Args:
        input: ``[tokens, hidden]``, contiguous, float32, float16 or bfloat16. Shape and dtype are equal on all
            ranks, and the workspace is on its device. For ``MoEFinalize`` it is ``[rows, hidden]``, the experts' rows
            to which ``expanded_idx_to_permuted_idx`` points. The tokens of the outputs are then those of that table.
        workspace: of :func:`create_allreduce_fusion_workspace`.
        pattern: of :class:`AllReduceFusionPattern`, without FP4.
        launch_with_pdl: let the kernel start before the preceding kernel ends, on Hopper and newer.
        output: like ``input``, receives the sum. Optional in patterns with the norm, otherwise allocated by default.
        residual_out, norm_out: like ``input``, allocated by default. Each output may be ``input`` or
            ``residual_in`` itself, and overlaps no other output. Patterns that do not write
            ``norm_out`` ignore it.
        quant_out: ``[tokens, hidden]``, contiguous, float8_e4m3fn, allocated by default.
        scale_out: for scales per token, contiguous float32 with one element for each token. For scales per group,
            int32 ``[tokens, words]`` of any strides. A word contains the exponents of four groups, the first in its
            lowest byte, and zeros after the last group. Allocated by default: ``[tokens, 1]``, or with strides
            ``(1, tokens)``, where tokens are rounded up to a multiple of 4.
        residual_in: like ``input``, and equal on all ranks. Required by the norm, as is ``rms_gamma``.
        rms_gamma: ``[hidden]``, of ``input``'s dtype.
        rms_eps: added to the mean of squares.
        scale_factor: a positive number, or a tensor with one element. A graph reads the tensor in each replay.
        block_quant_group_size: columns of a group. A power of two that divides ``hidden``, at most 512 and at least 16
            bytes of ``input``.
        weight_bias: added to ``rms_gamma``: 1 for Gemma.
        moe_reduction_device_num_experts: number of experts.
        moe_reduction_scale_input: ``[experts, tokens]`` in any shape, contiguous.
        moe_reduction_active_experts_token_input: ``[experts, tokens, hidden]`` in any shape, contiguous, of
            ``input``'s dtype.
        moe_reduction_token_input: ``[tokens, hidden]``, by default ``input``.
        expanded_idx_to_permuted_idx: ``[tokens, top_k]``, int32, rows of ``input``. Negative ones add nothing.
        expert_scale_factor: ``[tokens, top_k]``, by default ones.
        shared_expert_output: ``[tokens, hidden]``, of ``input``'s dtype, optional.
        trigger_completion_at_end, use_oneshot, fp32_acc, layout_code, moe_finalize_backend: change no result and are
            ignored.

    Returns:
        ``quant_out`` of a pattern that quantises, else ``norm_out``, or the sum for ``kAllReduce``.

    Raises:
        ValueError: invalid shapes or devices, an input that does not fit, partial overlap, a missing tensor,
            a destroyed workspace, or an unknown pattern. Nothing was sent.
        TypeError: invalid dtypes.
        UnsupportedError: a pattern with FP4.
        GroupError: an earlier call of the workspace failed, see ``workspace.check()``. On the CPU, this call.
        GradientError: a tensor requires a gradient.
    """
    op = "allreduce_fusion"
    check_tensor(op, "input", input)
    check_workspace(op, workspace)
    # An enumerator has the hash of its number. AllReduceFusionPattern(pattern) takes 0.4 us.
    if (after := EXPERT_PATTERNS.get(pattern)) is not None:  # type: ignore[call-overload]
        from . import _experts  # loads the experts' family

        if pattern == AllReduceFusionPattern.kMoEReductionARResidualRMSNorm:
            tokens = input if moe_reduction_token_input is None else moe_reduction_token_input
            input = _experts.reduced(
                op,
                tokens,
                moe_reduction_device_num_experts,
                moe_reduction_scale_input,
                moe_reduction_active_experts_token_input,
            )
        else:
            input = _experts.finalized(
                op, input, expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output
            )
        pattern = after
    order, table = workspace._order, workspace._table
    try:
        if pattern == _SUM:
            output = torch.empty_like(input) if output is None else output
            _allreduce(input, output, order, table, _SHOTS, launch_with_pdl)
            return output
        if (found := NORM_PATTERNS.get(pattern)) is None:  # type: ignore[call-overload]
            name = AllReduceFusionPattern(pattern).name
            raise UnsupportedError(f"{op}: pattern: got {name}, wanted one without FP4")
        if residual_in is None or rms_gamma is None:
            raise value_error(op, "rms_gamma" if residual_in is not None else "residual_in", None, "a tensor")
        quant, has_norm = found
        residual_out = torch.empty_like(input) if residual_out is None else residual_out
        norm_out = None if not has_norm else torch.empty_like(input) if norm_out is None else norm_out
        common = (input, residual_in, rms_gamma, output, residual_out, norm_out)
        if quant == 0:
            _allreduce_norm(*common, order, table, rms_eps, weight_bias, _SHOTS, launch_with_pdl)
            return norm_out  # type: ignore[return-value] # allocated above
        group = block_quant_group_size if quant == GROUP else 0
        if group is None:
            raise value_error(op, "block_quant_group_size", None, "a number of columns")
        scale: tuple[float, torch.Tensor | None] = (1.0, None)
        if quant == STATIC:
            if scale_factor is None:
                raise value_error(op, "scale_factor", None, "a number or a tensor")
            scale = scale_or_tensor(scale_factor, input)
        quant_out, scale_out = _quant_outputs(input, quant, group, quant_out, scale_out)
        last = (quant, *scale, group, rms_eps, weight_bias, _SHOTS, launch_with_pdl)
        _allreduce_norm_quant(*common, quant_out, scale_out, order, table, *last)
        return quant_out
    except GroupError:
        workspace.check()  # raises the error with its reason
        raise


def _quant_outputs(
    input: torch.Tensor, quant: int, group: int, quant_out: torch.Tensor | None, scale_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs of a quantised norm. Allocate those that the caller did not pass."""
    if quant_out is None:
        quant_out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
    if quant == STATIC:
        return quant_out, None
    if scale_out is None and input.dim() == 2:
        tokens, hidden = input.shape
        if quant == TOKEN:
            scale_out = input.new_empty(tokens, 1, dtype=torch.float32)
        else:
            words = -(-hidden // (4 * max(1, group)))
            scale_out = input.new_empty(words, -(-tokens // 4) * 4, dtype=torch.int32).T[:tokens]
    return quant_out, scale_out
