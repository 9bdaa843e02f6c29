"""Conditions that forbid work on modules: a freeze, and the capture of a CUDA graph.

After a freeze a missing module is an error, not a build. Existing modules still work. During a capture, a build or a
load would cause an error of CUDA, which ends the capture.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import AbstractContextManager

from .. import env
from ..errors import CaptureError, JitFrozenError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_freezes: set[Freeze] = set()  # add and discard are atomic, so a forked child finds no locked lock


class Freeze(AbstractContextManager["Freeze"]):
    """The freeze that :func:`freeze` returns.

    Leaving it as a context, or ``thaw()``, ends only this freeze.
    """

    def thaw(self) -> None:
        _freezes.discard(self)

    def __exit__(self, *error: object) -> None:
        self.thaw()


def freeze() -> Freeze:
    """Forbid builds in all threads of this process: a missing module raises ``JitFrozenError``.

    A call after warm-up holds for ever, and ``with freeze():`` holds for the block. Calls nest.
    """
    one = Freeze()
    _freezes.add(one)
    return one


def forbidden_by() -> str | None:
    """Return the cause that forbids builds now, or ``None``."""
    if _freezes:
        return "flashinfer.jit.freeze()"
    return "FLASHINFER_DISABLE_JIT" if env.DISABLE_JIT.get() else None


def check(name: str, reason: str) -> None:
    """Raise if builds are forbidden. ``reason``: why the module has to be built.

    Raises:
        JitFrozenError: builds are forbidden.
    """
    by = forbidden_by()
    if by is None:
        return
    frames = [frame for frame in traceback.extract_stack()[:-1] if f"{os.sep}torch{os.sep}" not in frame.filename]
    callers = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    # The public call: the first function of this package after the last one outside of it.
    entered = frames[frames.index(callers[-1]) + 1 :] if callers else frames
    raise JitFrozenError(name, by, reason, entered[0].name if entered else "", tuple(callers))


WARM_UP = "call flashinfer.warmup() with this function, or the function itself, once"


def refuse_capture(what: str, instead: str) -> None:
    """Raise if this thread's stream is being captured. Call it before work that is done only once.

    Args:
        what: a sentence that names the forbidden work.
        instead: the call to make before the capture.

    Raises:
        CaptureError: the stream is being captured. The capture continues with the operations captured so far.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what}, which would invalidate the CUDA graph that is being captured: {instead} before the capture"
        )
