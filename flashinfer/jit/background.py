"""``prefetch``: a child process that fetches and builds modules while this one loads weights.

(Not ``prefetch.py``: importing a file of a function's name would put the file in the function's place.)
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import BinaryIO, cast

from ..errors import FlashInferError
from . import frozen, process
from .machine.toolchain import find_python
from .spec import Spec

NICE = 10
# With this process's own path, which may have been changed since it started; until then without the current folder,
# whose files may be called as standard modules are.
_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.path); import pickle; sys.path[:] = pickle.load(sys.stdin.buffer);"
    " import flashinfer.jit.background as b; b.main()"
)

_running = set[subprocess.Popen[bytes]]()  # a child that nobody asks about goes on all the same


def _memory_file() -> BinaryIO:
    """Open a file without a name, for which no directory has to be writable."""
    return open(os.memfd_create("flashinfer"), "w+b")


class Prefetch:
    """Modules that are on their way. What of them is done, a load finds; for the rest it waits as for any other builder."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self._said, self._cancelled = _memory_file(), False
        weakref.finalize(self, self._said.close)
        forbidden = {"FLASHINFER_DISABLE_JIT": "1"} if frozen.forbidden_by() else {}
        with _memory_file() as told:
            told.write(pickle.dumps(sys.path) + pickle.dumps((self.specs, os.getpid())))
            told.seek(0)
            self._child = process.start(
                [find_python(), "-c", _CHILD], stdin=told, stdout=self._said, env={**os.environ, **forbidden},
                start_new_session=True,
            )  # fmt: skip
        _running.difference_update([child for child in _running if child.poll() is not None])
        _running.add(self._child)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._child.poll() is not None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of it.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds; it goes on.
            concurrent.futures.CancelledError: it was cancelled before it was done.
            BuildError, JitFrozenError, ToolchainError and others: a module is neither there nor built.
        """
        try:
            code = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"prefetch: {len(self.specs)} modules are not all there after {timeout:g} s") from None
        self._said.seek(0)
        if code == 0:
            error = cast("Exception | None", pickle.load(self._said))
        elif self._cancelled:
            raise CancelledError
        else:
            error = FlashInferError(f"prefetch: its process has ended with {code}")
        if error is not None:
            raise error

    def cancel(self) -> None:
        """End it, and its compilers with it; what they have compiled is not compiled again."""
        if self._child.poll() is None:
            self._cancelled = True
            self._child.terminate()
            self._child.wait()


def prefetch(specs: Sequence[Spec]) -> Prefetch:
    """Fetch and build in the background: in one child process of low priority, under the host's budget of compilers.

    The child ends with this process. Its events go to ``FLASHINFER_JIT_EVENTS``, with its process number.
    """
    return Prefetch(specs)


def main() -> None:
    """What the child does: build, and say what went wrong."""
    specs, parent = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(NICE)
    from .build import build_jit_specs
    from .group import portable

    error: Exception | None = None
    try:
        build_jit_specs(specs)
    except Exception as err:
        error = portable(err, "prefetch")
    sys.stdout.buffer.write(pickle.dumps(error))


def _end_with(parent: int) -> None:
    # Not prctl(PR_SET_PDEATHSIG), which would end the child with the thread that started it.
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)  # ninja and the compilers see that it is gone
