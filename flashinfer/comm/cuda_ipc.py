"""Buffers that all ranks of a group map: the names of FlashInfer 0.2.7, over the memory of workspaces."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .._ops.errors import value_error
from ._agree import Exchange
from ._memory import SharedMemory
from .mnnvl import CommBackend
from .workspace import HEADER_BYTES, agree_on_place, backend_of, device_of, load, share_empty

__all__ = ["create_shared_buffer", "free_shared_buffer"]


@dataclass
class Buffer:
    """A buffer of this process.

    Attributes:
        memory: of all ranks.
        count: bytes of each rank.
        rank: of this process.
        device: of the memory.
        shares: ranks on this rank's GPU.
        is_used: a workspace has sent words through it.
    """

    memory: SharedMemory
    count: int
    rank: int
    device: torch.device
    shares: int
    is_used: bool = False


_buffers: dict[tuple[int, ...], Buffer] = {}  # by the addresses of all ranks


def create_shared_buffer(
    size_in_bytes: int,
    group: Any = None,
    *,
    comm_backend: CommBackend | None = None,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Allocate memory on each rank, and map that of all ranks: a collective call.

    Args:
        size_in_bytes: equal on all ranks. The bytes are ``0xff``, which a workspace reads as empty.
        group: a process group, by default all ranks.
        comm_backend: exchanges objects between the ranks, by default over ``group``.
        device: by default the current GPU, or the CPU without one.

    Returns:
        The address of each rank's memory in this process, by rank.

    Raises:
        ValueError: sizes differ between ranks, or are not positive.
        RuntimeError: no memory, or memory that cannot be shared. All ranks raise the same error.
        UnsupportedError: the ranks are on several hosts.
    """
    op = "create_shared_buffer"
    exchange = Exchange(backend_of(op, None, comm_backend, group))

    def check() -> torch.device:
        if size_in_bytes < 1:
            raise value_error(op, "size_in_bytes", size_in_bytes, "a positive number")
        return device_of(device)

    where = exchange.run(check)
    shares = agree_on_place(op, exchange, where, size_in_bytes)
    library = exchange.run(lambda: load(where, torch.bfloat16, exchange.size))
    with _current(where):
        memory = share_empty(max(size_in_bytes, HEADER_BYTES), exchange, where, library)
    _buffers[memory.addresses] = Buffer(memory, size_in_bytes, exchange.rank, where, shares)
    return list(memory.addresses)


def free_shared_buffer(pointers: list[int], group: Any = None) -> None:
    """Unmap a buffer after this rank's kernels. This is a local call, so peers may still write to the memory.

    Args:
        pointers: of :func:`create_shared_buffer`.
        group: ignored.

    Raises:
        ValueError: other pointers, or a buffer that was freed.
    """
    buffer = buffer_of("free_shared_buffer", "pointers", pointers)
    del _buffers[buffer.memory.addresses]
    with _current(buffer.device):
        if buffer.device.type == "cuda":
            torch.cuda.synchronize(buffer.device)
        buffer.memory.close()


def buffer_of(op: str, argument: str, pointers: list[int]) -> Buffer:
    """Return the buffer with these addresses, or raise ``ValueError``."""
    buffer = _buffers.get(tuple(pointers))
    if buffer is None:
        raise value_error(op, argument, "other addresses", "those of create_shared_buffer")
    return buffer


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
