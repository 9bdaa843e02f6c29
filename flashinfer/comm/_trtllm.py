"""TensorRT-LLM's all-reduce, by the names of FlashInfer 0.2.7, over the workspace of ``allreduce_fusion``.

A workspace is a list of lists of addresses there, or a tensor. Here both only name a workspace object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import norm
from .._ops.errors import value_error
from .._ops.tensors import check_dims, check_tensor
from ..errors import UnsupportedError
from ._codes import AllReduceFusionOp, AllReduceFusionPattern
from .allreduce import GROUP, NORM_PATTERNS, TOKEN, allreduce_fusion
from .mnnvl import CommBackend
from .workspace import TRTLLMAllReduceFusionWorkspace

__all__ = [
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_custom_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]

LamportTokenNumThreshold = 16  # of FlashInfer: sizes of buffers that do not exist here
_BUFFERS = 7  # of a workspace of trtllm_custom_all_reduce

# By the address of the workspace's table.
_workspaces: dict[int, TRTLLMAllReduceFusionWorkspace] = {}


def _opened(workspace: TRTLLMAllReduceFusionWorkspace, buffers: int) -> list[list[int]]:
    """Keep a workspace and return its handles: ``buffers`` lists of the address of its table, one for each rank."""
    key = workspace._table.data_ptr()
    _workspaces[key] = workspace
    return [[key] * workspace.world_size for _ in range(buffers)]


def _workspace(op: str, argument: str, key: int) -> TRTLLMAllReduceFusionWorkspace:
    if key not in _workspaces:
        raise value_error(op, argument, "an unknown or destroyed workspace", "one of the create functions")
    return _workspaces[key]


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Any = None,
    create_metadata: bool = False,
    comm_backend: CommBackend | None = None,
    use_symm_dev_mem: bool = False,
    *,
    device: torch.device | str | int | None = None,
) -> tuple[Any, ...]:
    """Make the workspace of :func:`trtllm_allreduce_fusion`: a collective call.

    Args:
        tp_rank, tp_size: this rank, and the ranks of the group, at most 16.
        max_token_num, hidden_dim: the largest input, equal on all ranks.
        use_fp32_lamport: the largest input is float32. Otherwise it has elements of 16 bits.
        group, comm_backend, device: as in :class:`TRTLLMAllReduceFusionWorkspace`.
        create_metadata: also return the sizes.
        use_symm_dev_mem: also return an empty list of memory handles before the sizes.

    Returns:
        ``(handles, workspace, [memory handles], [sizes])``: ``workspace`` is an int64 tensor on the host, and the
        handles are for the function that destroys it.

    Raises:
        ValueError, RuntimeError, UnsupportedError, GroupError: as :class:`TRTLLMAllReduceFusionWorkspace` does.
    """
    made = TRTLLMAllReduceFusionWorkspace(
        tp_size,
        tp_rank,
        max_token_num,
        hidden_dim,
        torch.float32 if use_fp32_lamport else torch.bfloat16,
        comm_backend,
        group,
        device=device,
    )
    memory: tuple[Any, ...] = ([],) if create_metadata and use_symm_dev_mem else ()
    metadata: tuple[Any, ...] = (made.metadata,) if create_metadata else ()
    return _opened(made, 3), made._table, *memory, *metadata


def trtllm_create_ipc_workspace_for_all_reduce(
    rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    group: Any = None,
    *,
    comm_backend: CommBackend | None = None,
    device: torch.device | str | int | None = None,
) -> list[list[int]]:
    """Make the workspace of :func:`trtllm_custom_all_reduce`: a collective call.

    Args:
        rank, tp_size: this rank, and the ranks of the group, at most 16.
        max_token_num, hidden_dim: the largest input, of any dtype, equal on all ranks.
        group, comm_backend, device: as in :class:`TRTLLMAllReduceFusionWorkspace`.

    Returns:
        Seven lists with a number for each rank.

    Raises:
        ValueError, RuntimeError, UnsupportedError, GroupError: as :class:`TRTLLMAllReduceFusionWorkspace` does.
    """
    made = TRTLLMAllReduceFusionWorkspace(
        tp_size, rank, max_token_num, hidden_dim, torch.float32, comm_backend, group, device=device
    )
    return _opened(made, _BUFFERS)


def trtllm_destroy_ipc_workspace_for_all_reduce(workspace: list[list[int]], group: Any = None) -> None:
    """Destroy a workspace of either create function. This is a local call, and repeated calls do nothing.

    Args:
        workspace: the handles.
        group: ignored.
    """
    found = _workspaces.pop(workspace[0][0], None)
    if found is not None:
        found.destroy()


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace: list[list[int]], group: Any = None) -> None:
    """Destroy a workspace, as :func:`trtllm_destroy_ipc_workspace_for_all_reduce` does."""
    trtllm_destroy_ipc_workspace_for_all_reduce(workspace, group)


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Do nothing: a new workspace is initialised."""


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """Do nothing: a new workspace is initialised."""


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
    """Sum over the ranks with what follows: :func:`allreduce_fusion` on flat tensors, with outputs given.

    Args:
        allreduce_in, allreduce_out, residual_in, residual_out, norm_out: contiguous, with ``token_num * hidden_dim``
            elements in any shape.
        world_size, world_rank: as the workspace has.
        token_num, hidden_dim: shape of the input.
        workspace_ptrs: the tensor of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` itself.
        pattern_code: of :class:`AllReduceFusionPattern`. Every output that it writes is required, except
            ``residual_out``.
        quant_out: contiguous memory of any dtype, in which the first bytes become the ``float8_e4m3fn`` result.
        metadata: the workspace's sizes. A call with other sizes is refused.
        rms_eps, weight_bias: by default 1e-6 and 0.

    Other arguments are those of :func:`allreduce_fusion`.

    Raises:
        ValueError: a missing output, invalid sizes, or an unknown workspace, and errors of :func:`allreduce_fusion`.
        TypeError, UnsupportedError, GroupError: as :func:`allreduce_fusion` does.
    """
    op = "trtllm_allreduce_fusion"
    check_tensor(op, "workspace_ptrs", workspace_ptrs)
    workspace = _workspace(op, "workspace_ptrs", workspace_ptrs.data_ptr())
    _check_group(op, workspace, world_size, world_rank)
    if metadata is not None:
        _check_metadata(op, metadata, world_size, world_rank, token_num, hidden_dim, allreduce_in)
    pattern = AllReduceFusionPattern(pattern_code)
    _check_outputs(op, pattern, allreduce_out, norm_out, quant_out, scale_out)

    def shaped(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _view(op, name, tensor, token_num, hidden_dim)

    allreduce_fusion(
        _view(op, "allreduce_in", allreduce_in, token_num, hidden_dim),
        workspace,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output=shaped("allreduce_out", allreduce_out),
        residual_out=shaped("residual_out", residual_out),
        norm_out=shaped("norm_out", norm_out),
        quant_out=None if quant_out is None else _as_fp8(op, quant_out, token_num, hidden_dim),
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
    if quant_out is not None or scale_out is not None:
        raise UnsupportedError(f"{op}: quant_out: got a tensor, wanted None: there are no FP4 outputs")
    _fuse_experts(
        op,
        AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
        _view(op, "moe_reduction_token_input", moe_reduction_token_input, token_num, hidden_dim),
        (world_size, world_rank, token_num, hidden_dim),
        workspace_ptrs,
        launch_with_pdl,
        {
            "output": moe_allreduce_out,
            "residual_in": residual_in,
            "residual_out": residual_out,
            "norm_out": _required(op, "norm_out", norm_out),
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
) -> None:
    """Add the experts' rows of each token, then sum over the ranks and normalise.

    Args:
        allreduce_in: ``[..., hidden]``, contiguous: the experts' rows.
        residual_in, residual_out, norm_out: ``[tokens, hidden]``.
        norm_weight, eps: ``rms_gamma`` and ``rms_eps`` of :func:`allreduce_fusion`.
        workspace_ptrs: the tensor of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` itself.
        world_rank, world_size: as the workspace has.

    Other arguments are those of :func:`allreduce_fusion`.

    Raises:
        ValueError: invalid sizes or an unknown workspace, and errors of :func:`allreduce_fusion`.
        TypeError, GroupError: as :func:`allreduce_fusion` does.
    """
    op = "trtllm_moe_finalize_allreduce_fusion"
    check_dims(op, "residual_in", residual_in, 2)
    check_tensor(op, "allreduce_in", allreduce_in)
    tokens, hidden = residual_in.shape
    rows = allreduce_in.numel() // max(1, hidden)
    _fuse_experts(
        op,
        AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        _view(op, "allreduce_in", allreduce_in, rows, hidden),
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
    workspace = _workspace(op, "workspace_ptrs", workspace_ptrs.data_ptr())
    _check_group(op, workspace, size, rank)
    shaped: dict[str, Any] = {
        name: None if tensor is None else _view(op, name, tensor, tokens, hidden) for name, tensor in flat.items()
    }
    allreduce_fusion(x, workspace, pattern, launch_with_pdl, **shaped, **options)


def trtllm_custom_all_reduce(
    inp: torch.Tensor,
    out: torch.Tensor,
    tp_size: int,
    tp_rank: int,
    token_num: int,
    fusion_op_code: AllReduceFusionOp,
    strategy_code: int,
    config_code: int,
    launch_with_pdl: bool,
    flag_value: int,
    peer_comm_buffer_ptrs: torch.Tensor,
    peer_barrier_ptrs_in: torch.Tensor,
    peer_barrier_ptrs_out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    weight_pre_residual_norm: torch.Tensor | None,
    eps: float | None,
    intermediate_buffer: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_0: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_1: torch.Tensor | None,
    lamport_peer_comm_buffer_ptrs_2: torch.Tensor | None,
) -> None:
    """Sum over the ranks, with bias, residual and RMSNorm on request.

    - ``NONE``: ``out`` is the sum.
    - ``RESIDUAL_RMS_NORM``: ``intermediate_buffer`` is ``sum + (residual + bias)``, and ``out`` its norm with
      ``weight``. The sum in parentheses is rounded to the dtype.
    - ``RESIDUAL_RMS_PREPOST_NORM``: the norm of ``sum + bias`` with ``weight_pre_residual_norm`` replaces the sum,
      and ``intermediate_buffer`` adds the residual to it.

    Args:
        inp, out, residual, intermediate_buffer: contiguous, with ``token_num`` rows in any shape. The last one is
            required by the norms.
        tp_size, tp_rank: as the workspace has.
        fusion_op_code: of :class:`AllReduceFusionOp`.
        peer_comm_buffer_ptrs: the first list of :func:`trtllm_create_ipc_workspace_for_all_reduce`, as an int64
            tensor on the host.
        bias, weight, weight_pre_residual_norm: ``[hidden]``.
        eps: by default 1e-6.

    Other arguments change no result and are ignored.

    Raises:
        ValueError: a missing tensor, invalid sizes, or an unknown workspace.
        TypeError: invalid dtypes.
        UnsupportedError: another operation.
        GroupError: an earlier call of the workspace failed. On the CPU, this call.
    """
    op = "trtllm_custom_all_reduce"
    for name, tensor in (("inp", inp), ("out", out), ("peer_comm_buffer_ptrs", peer_comm_buffer_ptrs)):
        check_tensor(op, name, tensor)
    if peer_comm_buffer_ptrs.is_cuda:
        raise value_error(op, "peer_comm_buffer_ptrs", "a tensor on a GPU", "one on the host")
    workspace = _workspace(op, "peer_comm_buffer_ptrs", int(peer_comm_buffer_ptrs[0]))
    _check_group(op, workspace, tp_size, tp_rank)
    if token_num < 1 or inp.numel() % token_num:
        raise value_error(op, "token_num", token_num, f"a divisor of inp's {inp.numel()} elements")
    hidden = inp.numel() // token_num
    fusion = AllReduceFusionOp(fusion_op_code)
    epsilon = 1e-6 if eps is None else eps

    def shaped(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        return _view(op, name, _required(op, name, tensor), token_num, hidden)

    def total(to: torch.Tensor) -> torch.Tensor:
        return allreduce_fusion(
            shaped("inp", inp), workspace, AllReduceFusionPattern.kAllReduce, launch_with_pdl, output=to
        )

    to = shaped("out", out)
    if fusion == AllReduceFusionOp.NONE:
        total(to)
    elif fusion == AllReduceFusionOp.RESIDUAL_RMS_NORM:
        added = shaped("residual", residual)
        allreduce_fusion(
            shaped("inp", inp),
            workspace,
            AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl,
            residual_out=shaped("intermediate_buffer", intermediate_buffer),
            norm_out=to,
            residual_in=added if bias is None else added + bias,
            rms_gamma=weight,
            rms_eps=epsilon,
        )
    elif fusion == AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM:
        first = _required(op, "weight_pre_residual_norm", weight_pre_residual_norm)
        last = _required(op, "weight", weight)
        added, kept = shaped("residual", residual), shaped("intermediate_buffer", intermediate_buffer)
        x = total(torch.empty_like(to))
        norm.rmsnorm(x if bias is None else x + bias, first, epsilon, out=to)
        kept.copy_(added)
        norm.fused_add_rmsnorm(to, kept, last, epsilon)
    else:
        raise UnsupportedError(f"{op}: fusion_op_code: got {fusion.name}, wanted one without quantisation and experts")


def _check_group(op: str, workspace: TRTLLMAllReduceFusionWorkspace, size: int, rank: int) -> None:
    if (size, rank) != (workspace.world_size, workspace.rank):
        wanted = f"rank {workspace.rank} of {workspace.world_size} as the workspace has"
        raise value_error(op, "world_rank", f"rank {rank} of {size}", wanted)


def _check_metadata(
    op: str, metadata: dict[str, Any], size: int, rank: int, tokens: int, hidden: int, x: torch.Tensor
) -> None:
    """Refuse a call that the sizes of a workspace exclude."""
    is_fp32 = x.dtype == torch.float32
    checks: tuple[tuple[str, Any, Callable[[Any], bool]], ...] = (
        ("tp_size", size, lambda most: size == most),
        ("tp_rank", rank, lambda most: rank == most),
        ("max_token_num", tokens, lambda most: tokens <= most),
        ("hidden_dim", hidden, lambda most: hidden == most),
        ("use_fp32_lamport", is_fp32, lambda most: is_fp32 == most),
    )
    for name, got, fits in checks:
        if not fits(metadata[name]):
            raise value_error(op, f"metadata[{name!r}]", f"{metadata[name]} with {got} of the call", "sizes that fit")


def _check_outputs(
    op: str,
    pattern: AllReduceFusionPattern,
    allreduce_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
) -> None:
    """Refuse a call whose result would be lost: the function returns nothing."""
    quant, has_norm = NORM_PATTERNS.get(pattern, (0, False))
    required = {
        "allreduce_out": (pattern == AllReduceFusionPattern.kAllReduce, allreduce_out),
        "norm_out": (has_norm, norm_out),
        "quant_out": (quant != 0, quant_out),
        "scale_out": (quant in (TOKEN, GROUP), scale_out),
    }
    for name, (is_required, tensor) in required.items():
        if is_required:
            _required(op, name, tensor)


def _required(op: str, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise value_error(op, name, None, "a tensor")
    check_tensor(op, name, tensor)
    return tensor


def _view(op: str, name: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if not tensor.is_contiguous() or tensor.numel() != rows * columns:
        raise value_error(op, name, f"shape {list(tensor.shape)}", f"{rows * columns} contiguous elements")
    return tensor.view(rows, columns)


def _as_fp8(op: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    count = rows * columns
    if not tensor.is_contiguous() or tensor.numel() * tensor.itemsize < count:
        raise value_error(op, "quant_out", f"shape {list(tensor.shape)}", f"at least {count} contiguous bytes")
    return tensor.view(-1).view(torch.uint8)[:count].view(torch.float8_e4m3fn).view(rows, columns)
