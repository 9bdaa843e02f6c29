"""Starts of programs, pipes and imports during which no other thread can fork.

A child that is forked during an import has a half imported module. A child that is forked between the creation of a
pipe and the start of a program inherits an end of the pipe, and the pipe's reader never sees the end of the data.
Either process may hang. So a fork waits for the end of these steps.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

PATIENCE = 10.0  # seconds that a fork waits: a step that takes longer has failed

_fork_lock = threading.RLock()
_forking = set[int]()  # threads that hold the lock for a fork
_pipes = WeakSet[FileIO]()  # ends of pipes that a forked child must not keep


def without_forks() -> AbstractContextManager[Any]:
    """Return the context in which no other thread forks."""
    return _fork_lock


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program as :class:`subprocess.Popen` does."""
    with _fork_lock:
        return subprocess.Popen(command, **options)


def run(command: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(command, **{**pipes, **options}, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def pipe() -> tuple[int, FileIO]:
    """Open a pipe whose closing tells a child that this process has ended. Return the child's end and this one's.

    Both numbers are above 2. A pipe may get 0, 1 or 2 if they are closed, and the child would replace these.
    """
    with _fork_lock:
        ends = os.pipe()
        try:
            child_end, own_end = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
        finally:
            os.close(ends[0])
            os.close(ends[1])
        own = FileIO(own_end, "w")
        _pipes.add(own)
    return child_end, own


if TYPE_CHECKING:
    from functools import cached_property

    lazy = cached_property
else:

    class lazy:
        """``cached_property`` without its lock before Python 3.12, which a fork could copy locked."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.function.__name__, self.function(instance))


def _before_fork() -> None:
    if _fork_lock.acquire(timeout=PATIENCE):
        _forking.add(threading.get_ident())


def _in_parent() -> None:
    if threading.get_ident() in _forking:
        _forking.discard(threading.get_ident())
        _fork_lock.release()


def _in_child() -> None:
    global _fork_lock
    _fork_lock = threading.RLock()
    _forking.clear()
    for end in tuple(_pipes):
        end.close()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
