"""Ranks of a group as threads of one process: on the CPU, or as streams of one GPU."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from flashinfer.comm.mnnvl import CommBackend
from flashinfer.comm.workspace import TRTLLMAllReduceFusionWorkspace as Workspace


class Meeting:
    """The exchange of objects between threads."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadBackend(CommBackend):
    """Exchange of objects between threads. No two of them share a value that one has changed."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.meeting.size

    def allgather(self, data: Any) -> list[Any]:
        self.meeting.values[self.rank] = pickle.loads(pickle.dumps(data))  # as between processes
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def Split(self, color: int, key: int) -> CommBackend:
        raise NotImplementedError


def on_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Return ``body(rank)`` of each rank, or the exception that it raised."""
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as err:
            results[rank] = err

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return results


@contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """Keep a GPU's ranks from waiting for each other on the host. Print the stacks of threads that hang for 30 s.

    A garbage collection between the launches of two ranks could free an object whose end waits for the GPU, on which
    the first rank waits for the second.
    """
    if device == "cuda":
        gc.disable()
        faulthandler.dump_traceback_later(30, file=sys.__stderr__)
    try:
        yield
    finally:
        if device == "cuda":
            faulthandler.cancel_dump_traceback_later()
            gc.enable()


class Ranks:
    """Threads, each with the workspace that ``create(rank, backend)`` returned.

    ``run(body)`` calls ``body(rank, workspace)`` on every rank, on a stream of its own, and returns the results. On
    a GPU the body only launches: a first use of another kernel could wait for the ranks' running kernels.
    """

    def __init__(self, size: int, create: Callable[[int, CommBackend], Any], device: str = "cpu") -> None:
        self.size, self.device, meeting = size, device, Meeting(size)
        self.streams = [torch.cuda.Stream() for _ in range(size)] if device == "cuda" else []
        self.workspaces: list[Any] = on_threads(size, lambda rank: create(rank, ThreadBackend(meeting, rank)))
        for one in self.workspaces:
            if isinstance(one, Exception):
                raise one
        for stream in self.streams:  # a cudaMalloc during a call could wait for the ranks' running kernels
            with torch.cuda.stream(stream):
                torch.empty(1 << 19, dtype=torch.uint8, device=device)
                torch.empty(1 << 24, dtype=torch.uint8, device=device)

    def check(self, rank: int) -> None:
        """Raise the error that the calls of a rank have ended with."""

    def outcomes(self, body: Callable[[int, Any], Any]) -> list[Any]:
        """Return results, or exceptions that were raised."""

        def call(rank: int) -> Any:
            with torch.cuda.stream(self.streams[rank]) if self.streams else nullcontext():
                result = body(rank, self.workspaces[rank])
                if self.streams:
                    self.streams[rank].synchronize()
            self.check(rank)
            return result

        if self.device == "cuda":
            torch.cuda.synchronize()
        with _undisturbed(self.device):
            return on_threads(self.size, call)

    def run(self, body: Callable[[int, Any], Any]) -> list[Any]:
        """Return results, and raise the first exception."""
        results = self.outcomes(body)
        for one in results:
            if isinstance(one, Exception):
                raise one
        return results

    def bound_launches(self, rank: int, number: int) -> None:
        """Wait for the rank's stream after every hundredth call: a launch into a full queue would stop all threads."""
        if self.streams and number % 100 == 99:
            self.streams[rank].synchronize()


class Group(Ranks):
    """Threads with a workspace of ``allreduce_fusion`` each."""

    def __init__(self, size: int, tokens: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> None:
        def create(rank: int, backend: CommBackend) -> Workspace:
            return Workspace(size, rank, tokens, hidden, dtype, backend, device=torch.device(device))

        super().__init__(size, create, device)

    def check(self, rank: int) -> None:
        self.workspaces[rank].check()

    def destroy(self) -> None:
        for one in self.workspaces:
            one.destroy()
