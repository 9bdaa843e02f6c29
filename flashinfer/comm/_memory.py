"""Memory that every rank of a group maps, by file descriptors over sockets or by handles of ``cudaIpc``.

The memory of a descriptor exists until its last mapping is gone. Other ranks can therefore still write it after one
rank has died or called ``close()``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ._agree import Exchange

SOCKET_SECONDS = 60.0  # to wait for a connection: all peers are in this step, so they connect at once
HANDLE_BYTES = 64  # of cudaIpc


@dataclass(frozen=True)
class SharedMemory:
    """One area of each rank. Each area is filled with ``0xff`` and mapped by all ranks.

    Attributes:
        addresses: of each rank's area in this process, by rank.
        mechanism: ``"memfd"``, ``"vmm"`` or ``"cudaIpc"``.
        write, read: copy bytes from and to the host.
        close: unmaps all areas of this process.
    """

    addresses: tuple[int, ...]
    mechanism: str
    write: Callable[[int, bytes], None]
    read: Callable[[int, int], bytes]
    close: Callable[[], None]


class Library:
    """Functions of the CUDA module that allocate and map memory of the current device.

    Args:
        path: the loaded module.
    """

    def __init__(self, path: str) -> None:
        self._module = ctypes.CDLL(path)

    def __call__(self, name: str, *arguments: Any) -> None:
        text = ctypes.create_string_buffer(256)
        if getattr(self._module, f"comm_{name}")(text, *arguments) != 0:
            raise RuntimeError(text.value.decode(errors="replace"))

    def address(self, name: str, *arguments: Any) -> int:
        """Call a function whose last argument receives an address."""
        found = ctypes.c_int64()
        self(name, *arguments, ctypes.byref(found))
        return found.value


def share_on_host(count: int, exchange: Exchange) -> SharedMemory:
    """Share ``count`` bytes of host memory of each rank.

    Raises:
        OSError: no memory, or descriptors cannot be sent. All ranks raise it.
    """
    with ExitStack() as undo:

        def create() -> int:
            own = os.memfd_create("flashinfer-comm")
            undo.callback(os.close, own)
            os.posix_fallocate(own, 0, count)  # allocate now: a later lack of memory would be a signal, not an error
            return own

        own = exchange.run(create)
        views, descriptors = list[Any](), exchange_descriptors(own, exchange, undo)

        def map_all() -> None:
            views.extend(_mapped(descriptor, count) for descriptor in descriptors)
            ctypes.memset(views[exchange.rank], 0xFF, count)

        exchange.vote(map_all)
    addresses = tuple(ctypes.addressof(view) for view in views)
    return SharedMemory(addresses, "memfd", _write_host, ctypes.string_at, views.clear)


def _mapped(descriptor: int, count: int) -> Any:
    """Return a view of a descriptor's memory. The mapping lives as long as the view."""
    return (ctypes.c_char * count).from_buffer(mmap.mmap(descriptor, count))


def _write_host(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def share_on_gpu(count: int, exchange: Exchange, device: int, library: Library) -> SharedMemory:
    """Share ``count`` bytes of GPU memory of each rank: by descriptors, or by ``cudaIpc`` if these fail.

    Raises:
        RuntimeError: both mechanisms fail. The text has both reasons. All ranks raise it.
    """
    try:
        return _share_descriptors(count, exchange, device, library)
    except Exception as err:  # the same on every rank
        reason = err
    try:
        return _share_handles(count, exchange, library)
    except Exception as err:
        raise RuntimeError(f"memory cannot be shared: by descriptors: {reason}; by cudaIpc: {err}") from None


def _share_descriptors(count: int, exchange: Exchange, device: int, library: Library) -> SharedMemory:
    unit = ctypes.c_int64()
    exchange.vote(lambda: library("granularity", device, ctypes.byref(unit)))
    count = -(-count // unit.value) * unit.value
    number = ctypes.c_int64(count)
    with ExitStack() as undo, ExitStack() as temporary:
        addresses = dict[int, int]()

        def keep(rank: int, address: int) -> None:
            addresses[rank] = address
            undo.callback(library, "unmap", ctypes.c_int64(address), number)

        def create() -> int:
            own = ctypes.c_int(-1)
            keep(exchange.rank, library.address("create", device, number, ctypes.byref(own)))
            temporary.callback(os.close, own.value)
            library("clear", ctypes.c_int64(addresses[exchange.rank]), number)
            return own.value

        own = exchange.run(create)
        descriptors = exchange_descriptors(own, exchange, temporary)

        def open_all() -> None:
            for rank, descriptor in enumerate(descriptors):
                if rank != exchange.rank:
                    keep(rank, library.address("open", device, number, descriptor))

        exchange.vote(open_all)
        close = undo.pop_all().close
    return _gpu_memory(addresses, "vmm", library, close)


def _share_handles(count: int, exchange: Exchange, library: Library) -> SharedMemory:
    with ExitStack() as undo:
        addresses = dict[int, int]()

        def create() -> bytes:
            handle = ctypes.create_string_buffer(HANDLE_BYTES)
            address = library.address("ipc_create", ctypes.c_int64(count), handle)
            addresses[exchange.rank] = address
            undo.callback(library, "free", ctypes.c_int64(address))
            library("clear", ctypes.c_int64(address), ctypes.c_int64(count))
            return handle.raw

        handles = exchange.vote(create)

        def open_all() -> None:
            for rank, handle in enumerate(handles):
                if rank != exchange.rank:
                    addresses[rank] = library.address("ipc_open", handle)
                    undo.callback(library, "ipc_close", ctypes.c_int64(addresses[rank]))

        exchange.vote(open_all)
        close = undo.pop_all().close
    return _gpu_memory(addresses, "cudaIpc", library, close)


def _gpu_memory(addresses: dict[int, int], mechanism: str, library: Library, close: Callable[[], None]) -> SharedMemory:
    def write(address: int, data: bytes) -> None:
        library("write", ctypes.c_int64(address), data, ctypes.c_int64(len(data)))

    def read(address: int, count: int) -> bytes:
        data = ctypes.create_string_buffer(count)
        library("read", ctypes.c_int64(address), data, ctypes.c_int64(count))
        return data.raw

    return SharedMemory(tuple(address for _, address in sorted(addresses.items())), mechanism, write, read, close)


def exchange_descriptors(own: int, exchange: Exchange, undo: ExitStack) -> list[int]:
    """Send this rank's descriptor to all peers. Return the descriptors of all ranks, by rank.

    Sockets are in the abstract namespace, so a killed process leaves no file. ``undo`` closes received descriptors.

    Raises:
        OSError: a peer cannot connect, or belongs to another user. All ranks raise it.
    """
    with ExitStack() as sockets:

        def listen() -> bytes:
            name = b"\0flashinfer-" + secrets.token_hex(16).encode()
            listener.bind(name)
            listener.listen(exchange.size)
            return name

        listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(SOCKET_SECONDS)
        names = exchange.vote(listen)

        def send() -> None:
            for peer, name in enumerate(names):
                if peer != exchange.rank:
                    connection = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    connection.settimeout(SOCKET_SECONDS)
                    connection.connect(name)
                    socket.send_fds(connection, [bytes([exchange.rank])], [own])

        def receive() -> dict[int, int]:
            found = {exchange.rank: own}
            while len(found) < exchange.size:
                connection = sockets.enter_context(listener.accept()[0])
                connection.settimeout(SOCKET_SECONDS)
                _check_user(connection)
                data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
                for descriptor in descriptors:
                    undo.callback(os.close, descriptor)
                if len(data) != 1 or len(descriptors) != 1 or data[0] in found or data[0] >= exchange.size:
                    raise OSError(f"descriptors: got {len(descriptors)} with {data!r}, wanted one with its rank")
                found[data[0]] = descriptors[0]
            return found

        exchange.vote(send)
        found = exchange.run(receive)
        return [found[rank] for rank in range(exchange.size)]


def _check_user(connection: socket.socket) -> None:
    """Refuse a connection of another user, because any process of the machine may connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", credentials)[1]
    if user != os.geteuid():
        raise OSError(f"descriptors: got a connection of user {user}, wanted one of user {os.geteuid()}")
