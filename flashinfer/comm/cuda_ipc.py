"""Buffers that all ranks of a group map, and the CUDA runtime by ctypes: the names of FlashInfer 0.2.7.

Buffers lie in the memory of workspaces.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .._ops.errors import type_error, value_error
from ._agree import Exchange
from ._memory import HANDLE_BYTES, SharedMemory
from .mnnvl import CommBackend
from .workspace import HEADER_BYTES, agree_on_place, backend_of, device_of, load, share_empty

__all__ = ["CudaRTLibrary", "create_shared_buffer", "free_shared_buffer"]

COPY_BY_ADDRESSES = 4  # cudaMemcpyDefault
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class IpcHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``: bytes that another process opens."""

    _fields_ = (("internal", ctypes.c_byte * HANDLE_BYTES),)


class CudaRTLibrary:
    """Functions of the CUDA runtime, by their names in C. A failed call raises ``RuntimeError`` with CUDA's text.

    Args:
        so_file: path of the library, by default the ``libcudart`` that this process has loaded.

    Raises:
        ValueError: no path, and the process has loaded none.
        OSError: the library cannot be loaded.
    """

    def __init__(self, so_file: str | None = None) -> None:
        path = _loaded_runtime() if so_file is None else so_file
        if path is None:
            raise value_error("CudaRTLibrary", "so_file", "none, and no libcudart is loaded", "a path")
        self._functions = ctypes.CDLL(path)
        self._functions.cudaGetErrorString.restype = ctypes.c_char_p

    def CUDART_CHECK(self, result: int) -> None:
        """Raise ``RuntimeError`` for another result than 0."""
        if result != 0:
            raise RuntimeError(f"CUDART error: {self.cudaGetErrorString(result)}")

    def cudaGetErrorString(self, error: int) -> str:
        """Return the text of an error."""
        text: bytes = self._functions.cudaGetErrorString(ctypes.c_int(error))
        return text.decode()

    def cudaSetDevice(self, device: int) -> None:
        """Make a device current."""
        self._call("cudaSetDevice", ctypes.c_int(device))

    def cudaDeviceSynchronize(self) -> None:
        """Wait for the current device."""
        self._call("cudaDeviceSynchronize")

    def cudaDeviceReset(self) -> None:
        """Destroy the current device's context."""
        self._call("cudaDeviceReset")

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        """Allocate bytes on the current device and return their address."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        """Free the bytes of :meth:`cudaMalloc`."""
        self._call("cudaFree", devPtr)

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        """Fill bytes."""
        self._call("cudaMemset", devPtr, ctypes.c_int(value), ctypes.c_size_t(count))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        """Copy bytes between devices and the host, by their addresses."""
        self._call("cudaMemcpy", dst, src, ctypes.c_size_t(count), ctypes.c_int(COPY_BY_ADDRESSES))

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> IpcHandle:
        """Return a handle of :meth:`cudaMalloc`'s memory for another process."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), devPtr)
        return handle

    def cudaIpcOpenMemHandle(self, handle: IpcHandle) -> ctypes.c_void_p:
        """Map another process's memory and return its address."""
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        return pointer

    def _call(self, name: str, *arguments: Any) -> None:
        self.CUDART_CHECK(getattr(self._functions, name)(*arguments))


def _loaded_runtime() -> str | None:
    """Return the path of this process's CUDA runtime."""
    with open("/proc/self/maps") as file:
        paths = (line.split(maxsplit=5)[-1].strip() for line in file if "libcudart" in line)
        return next((path for path in paths if path.startswith("/")), None)


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
    """Allocate memory on each rank, and map the memory of all ranks. This is a collective call.

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
    """Wait for this rank's kernels and unmap a buffer. This is a local call: peers may still write to the memory.

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
    """Return the buffer with these addresses, or raise ``TypeError`` or ``ValueError``."""
    if not isinstance(pointers, (list, tuple)):
        raise type_error(op, argument, type(pointers).__name__, "a list of addresses")
    buffer = _buffers.get(tuple(pointers))
    if buffer is None:
        raise value_error(op, argument, "other addresses", "those of create_shared_buffer")
    return buffer


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
