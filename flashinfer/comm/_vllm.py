"""vLLM's all-reduce with the names of FlashInfer 0.2.7, over a workspace in a shared buffer.

In vLLM, ranks register the addresses of their tensors, and peers read them. Here peers write to inboxes, so registration
is not needed: its functions check their arguments, or reset the count of captured calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._ops.errors import value_error
from .._ops.tensors import check_tensor
from ._codes import AllReduceFusionPattern
from ._memory import HANDLE_BYTES
from .allreduce import allreduce_fusion
from .cuda_ipc import buffer_of
from .workspace import HEADER_BYTES, PART_BYTES, SLOTS, TRTLLMAllReduceFusionWorkspace

__all__ = [
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]

INBOX_BYTES = 4 << 20  # larger inputs are sent in pieces


@dataclass
class _Instance:
    workspace: TRTLLMAllReduceFusionWorkspace
    captured: int = 0  # calls in graphs since the last registration


_instances: dict[int, _Instance] = {}


def vllm_meta_size() -> int:
    """Return the bytes that :func:`create_shared_buffer` must allocate for :func:`vllm_init_custom_ar`."""
    return INBOX_BYTES


def vllm_init_custom_ar(ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool) -> int:
    """Make an all-reduce in a shared buffer. This is a local call.

    Args:
        ipc_tensors: of :func:`create_shared_buffer`, with at least :func:`vllm_meta_size` bytes. A buffer serves one
            call of this function.
        rank_data: ignored.
        rank: this rank.
        full_nvlink: ignored. The buffer's memory is mapped on every rank.

    Returns:
        A number for the other functions.

    Raises:
        ValueError: other addresses, another rank, a small buffer, or one that was used before.
    """
    op = "vllm_init_custom_ar"
    check_tensor(op, "rank_data", rank_data)
    buffer = buffer_of(op, "ipc_tensors", ipc_tensors)
    if rank != buffer.rank:
        raise value_error(op, "rank", rank, f"{buffer.rank} as the buffer has")
    if buffer.count < INBOX_BYTES:
        raise value_error(op, "ipc_tensors", f"{buffer.count} bytes", f"at least {INBOX_BYTES}")
    if buffer.is_used:  # peers may still write words of the last all-reduce
        raise value_error(op, "ipc_tensors", "a buffer of another all-reduce", "a new one")
    buffer.is_used = True
    areas = SLOTS * max(1, len(ipc_tensors) - 1)
    slot_bytes = (INBOX_BYTES - HEADER_BYTES) // areas // PART_BYTES * PART_BYTES
    workspace = TRTLLMAllReduceFusionWorkspace._over(
        buffer.memory.addresses, rank, slot_bytes, buffer.device, buffer.shares
    )
    number = id(workspace)
    _instances[number] = _Instance(workspace)
    return number


def vllm_all_reduce(
    fa: int, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int, reg_buffer_sz_bytes: int, num_ctas: int
) -> None:
    """Write the sum of ``inp`` over the ranks to ``out``, with the bits of :func:`allreduce_fusion`.

    Args:
        fa: of :func:`vllm_init_custom_ar`.
        inp: contiguous, float32, float16 or bfloat16, with equal shapes on all ranks.
        out: like ``inp``, or ``inp`` itself.
        reg_buffer, reg_buffer_sz_bytes, num_ctas: ignored.

    Raises:
        ValueError: an unknown ``fa``, or invalid tensors.
        TypeError: invalid dtypes.
        GroupError: an earlier call failed. On the CPU, this call.
    """
    op = "vllm_all_reduce"
    for name, tensor in (("inp", inp), ("out", out)):
        check_tensor(op, name, tensor)
        if not tensor.is_contiguous():
            raise value_error(op, name, "a tensor that is not contiguous", "a contiguous one")
    instance = _instance(op, fa)
    if out.shape != inp.shape:
        raise value_error(op, "out", list(out.shape), f"{list(inp.shape)} as inp has")
    if inp.is_cuda and torch.cuda.is_current_stream_capturing():
        instance.captured += 1
    piece = instance.workspace._slot_bytes // inp.itemsize
    inputs, outputs = inp.view(1, -1), out.view(1, -1)
    for first in range(0, inp.numel(), piece):
        columns = slice(first, first + piece)
        allreduce_fusion(
            inputs[:, columns], instance.workspace, AllReduceFusionPattern.kAllReduce, output=outputs[:, columns]
        )


def vllm_dispose(fa: int) -> None:
    """Wait for this rank's kernels and release an all-reduce. Free its buffer by :func:`free_shared_buffer`."""
    _instance("vllm_dispose", fa).workspace.destroy()
    del _instances[fa]


def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Do nothing: ``inp`` of :func:`vllm_all_reduce` may be any tensor."""
    _instance("vllm_register_buffer", fa)


def vllm_get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """Return zeros in place of handles and offsets of the calls captured since the last registration."""
    captured = _instance("vllm_get_graph_buffer_ipc_meta", fa).captured
    return [0] * (HANDLE_BYTES * captured), [0] * captured


def vllm_register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    """Reset the count of captured calls. Graphs need no registration."""
    _instance("vllm_register_graph_buffers", fa).captured = 0


def _instance(op: str, fa: int) -> _Instance:
    if fa not in _instances:
        raise value_error(op, "fa", fa, "a number of vllm_init_custom_ar")
    return _instances[fa]
