"""Workspaces of TensorRT-LLM's all-reduce: functions that create, destroy and find them."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops.errors import value_error
from ..mnnvl import CommBackend
from ..workspace import TRTLLMAllReduceFusionWorkspace

_BUFFERS = 7  # of a workspace of trtllm_custom_all_reduce

# By the address of the workspace's table.
_workspaces: dict[int, TRTLLMAllReduceFusionWorkspace] = {}


def _opened(workspace: TRTLLMAllReduceFusionWorkspace, buffers: int) -> list[list[int]]:
    """Register a workspace. Return its handles: ``buffers`` lists that contain the address of its table per rank."""
    key = workspace._table.data_ptr()
    _workspaces[key] = workspace
    return [[key] * workspace.world_size for _ in range(buffers)]


def find_workspace(op: str, argument: str, key: int) -> TRTLLMAllReduceFusionWorkspace:
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


def check_group(op: str, workspace: TRTLLMAllReduceFusionWorkspace, size: int, rank: int) -> None:
    if (size, rank) != (workspace.world_size, workspace.rank):
        wanted = f"rank {workspace.rank} of {workspace.world_size} as the workspace has"
        raise value_error(op, "world_rank", f"rank {rank} of {size}", wanted)
