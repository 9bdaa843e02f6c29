"""TensorRT-LLM's all-reduce with the names of FlashInfer 0.2.7, over the workspace of ``allreduce_fusion``.

In FlashInfer, a workspace is a tensor or a list of lists of addresses. Here both are handles of a workspace object.
"""

from __future__ import annotations

from .custom import trtllm_custom_all_reduce
from .fusion import (
    trtllm_allreduce_fusion,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from .workspaces import (
    trtllm_create_ipc_workspace_for_all_reduce,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_lamport_initialize,
    trtllm_lamport_initialize_all,
)

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

LamportTokenNumThreshold = 16  # of FlashInfer: sizes of buffers that do not exist here
