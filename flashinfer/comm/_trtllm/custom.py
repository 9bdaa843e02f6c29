"""``trtllm_custom_all_reduce``: FlashInfer's interface to TensorRT-LLM's all-reduce, on the kernels of this library."""

from __future__ import annotations

import torch

from ... import norm
from ..._ops.errors import value_error
from ..._ops.tensors import check_tensor
from ...errors import UnsupportedError
from .._codes import AllReduceFusionOp, AllReduceFusionPattern
from ..allreduce import allreduce_fusion
from .tensors import as_rows, required
from .workspaces import check_group, find_workspace


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
    """Sum over the ranks, optionally with bias, residual and RMSNorm.

    - ``NONE``: ``out`` is the sum.
    - ``RESIDUAL_RMS_NORM``: ``intermediate_buffer`` is ``sum + (residual + bias)``, and ``out`` its norm with
      ``weight``. The sum in parentheses is rounded to the dtype.
    - ``RESIDUAL_RMS_PREPOST_NORM``: ``x`` is the norm of ``sum + bias`` with ``weight_pre_residual_norm``,
      ``intermediate_buffer`` is ``x + residual``, and ``out`` its norm with ``weight``.

    Args:
        inp, out, residual, intermediate_buffer: contiguous, with ``token_num`` rows in any shape. The norms require
            ``intermediate_buffer``.
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
    workspace = find_workspace(op, "peer_comm_buffer_ptrs", int(peer_comm_buffer_ptrs[0]))
    check_group(op, workspace, tp_size, tp_rank)
    if token_num < 1 or inp.numel() % token_num:
        raise value_error(op, "token_num", token_num, f"a divisor of inp's {inp.numel()} elements")
    hidden = inp.numel() // token_num
    fusion = AllReduceFusionOp(fusion_op_code)
    epsilon = 1e-6 if eps is None else eps

    def shaped(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        return as_rows(op, name, required(op, name, tensor), token_num, hidden)

    def total(rows_out: torch.Tensor) -> torch.Tensor:
        return allreduce_fusion(
            shaped("inp", inp), workspace, AllReduceFusionPattern.kAllReduce, launch_with_pdl, output=rows_out
        )

    rows_out = shaped("out", out)
    if fusion == AllReduceFusionOp.NONE:
        total(rows_out)
    elif fusion == AllReduceFusionOp.RESIDUAL_RMS_NORM:
        added = shaped("residual", residual)
        allreduce_fusion(
            shaped("inp", inp),
            workspace,
            AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl,
            residual_out=shaped("intermediate_buffer", intermediate_buffer),
            norm_out=rows_out,
            residual_in=added if bias is None else added + bias,
            rms_gamma=weight,
            rms_eps=epsilon,
        )
    elif fusion == AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM:
        first = required(op, "weight_pre_residual_norm", weight_pre_residual_norm)
        last = required(op, "weight", weight)
        added, kept = shaped("residual", residual), shaped("intermediate_buffer", intermediate_buffer)
        x = total(torch.empty_like(rows_out))
        norm.rmsnorm(x if bias is None else x + bias, first, epsilon, out=rows_out)
        kept.copy_(added)
        norm.fused_add_rmsnorm(rows_out, kept, last, epsilon)
    else:
        raise UnsupportedError(f"{op}: fusion_op_code: got {fusion.name}, wanted one without quantisation and experts")
