"""Freezing: afterwards a missing module is an error, not a build. Existing modules still work."""

from __future__ import annotations

import os
import traceback
from contextlib import AbstractContextManager

from .. import env
from ..errors import JitFrozenError

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
    """Raise before a build that is forbidden. ``reason``: why the module has to be built.

    Raises:
        JitFrozenError: builds are forbidden.
    """
    by = forbidden_by()
    if by is None:
        return
    frames = [frame for frame in traceback.extract_stack()[:-1] if f"{os.sep}torch{os.sep}" not in frame.filename]
    callers = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    # The public call: the first function of this package after the last line outside of it.
    entered = frames[frames.index(callers[-1]) + 1 :] if callers else frames
    raise JitFrozenError(name, by, reason, entered[0].name if entered else "", tuple(callers))
