"""``prefetch``: a child process that fetches and builds modules while this process loads weights.

The file is not called ``prefetch.py``, because importing it would replace the function of that name in the
package.
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
# The child takes over this process's sys.path. Before that, it imports nothing from the current directory, where a
# file may have the name of a standard module.
_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.path); import pickle; sys.path[:] = pickle.load(sys.stdin.buffer);"
    " import flashinfer.jit.background as b; b.main()"
)

_running = set[subprocess.Popen[bytes]]()  # running children, also those whose Prefetch no longer exists


def _memory_file() -> BinaryIO:
    """Open a file without a name, which needs no writable directory."""
    return open(os.memfd_create("flashinfer"), "w+b")


class Prefetch:
    """Modules that a child process fetches and builds.

    A load finds the finished ones. It waits for the others, as for those of any process that builds.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self._result, self._cancelled = _memory_file(), False
        weakref.finalize(self, self._result.close)
        forbidden = {"FLASHINFER_DISABLE_JIT": "1"} if frozen.forbidden_by() else {}
        with _memory_file() as arguments:
            arguments.write(pickle.dumps(sys.path) + pickle.dumps((self.specs, os.getpid())))
            arguments.seek(0)
            self._child = process.start(
                [find_python(), "-c", _CHILD], stdin=arguments, stdout=self._result, env={**os.environ, **forbidden},
                start_new_session=True,
            )  # fmt: skip
        _running.difference_update([child for child in _running if child.poll() is not None])
        _running.add(self._child)

    @property
    def done(self) -> bool:
        """Return whether the child has ended, successfully or not."""
        return self._child.poll() is not None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the child.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds. It continues.
            concurrent.futures.CancelledError: it was cancelled before it was done.
            BuildError, JitFrozenError, ToolchainError and others: a module does not exist and was not built.
        """
        try:
            code = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"prefetch: {len(self.specs)} modules are not all ready after {timeout:g} s") from None
        self._result.seek(0)
        if code == 0:
            error = cast("Exception | None", pickle.load(self._result))
        elif self._cancelled:
            raise CancelledError
        else:
            error = FlashInferError(f"prefetch: its process ended with {code}")
        if error is not None:
            raise error

    def cancel(self) -> None:
        """End the child and its compilers. Finished objects are reused by the next build."""
        if self._child.poll() is None:
            self._cancelled = True
            self._child.terminate()
            self._child.wait()


def prefetch(specs: Sequence[Spec]) -> Prefetch:
    """Fetch and build modules in one child process of low priority, under the host's limit of compilers.

    The child ends with this process. It writes its events to ``FLASHINFER_JIT_EVENTS``, with its own pid.
    """
    return Prefetch(specs)


def main() -> None:
    """Build in the child process, and write the error or ``None`` to standard output."""
    specs, parent = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(NICE)
    from .group import portable
    from .resolve import build_jit_specs

    error: Exception | None = None
    try:
        build_jit_specs(specs)
    except Exception as err:
        error = portable(err, "prefetch")
    sys.stdout.buffer.write(pickle.dumps(error))


def _end_with(parent: int) -> None:
    # prctl(PR_SET_PDEATHSIG) would end the child with the thread that started it, not with the process.
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)  # ninja and the compilers notice that
