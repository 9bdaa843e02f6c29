"""Freezing: after it, a module that is missing is an error, not a build. Hits of every kind go on."""

from __future__ import annotations

import os
import traceback
from contextlib import AbstractContextManager

from .. import env
from ..errors import JitFrozenError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_freezes: set[Freeze] = set()  # adding and discarding are atomic, and a forked child finds no lock taken


class Freeze(AbstractContextManager["Freeze"]):
    """The freeze that :func:`freeze` returns. Leaving it as a context, or ``thaw()``, takes back this one call."""

    def thaw(self) -> None:
        _freezes.discard(self)

    def __exit__(self, *error: object) -> None:
        self.thaw()


def freeze() -> Freeze:
    """From now on no thread of this process compiles a module: one that is missing raises ``JitFrozenError``.

    Called after warm-up it holds for ever; as ``with freeze():`` it holds for the block. Calls nest.
    """
    one = Freeze()
    _freezes.add(one)
    return one


def forbidden_by() -> str | None:
    """Returns what forbids building now, or ``None``."""
    if _freezes:
        return "flashinfer.jit.freeze()"
    return "FLASHINFER_DISABLE_JIT" if env.DISABLE_JIT.get() else None


def check(name: str, reason: str) -> None:
    """Is asked before a module is built, with the reason why it has to be.

    Raises:
        JitFrozenError: it must not be.
    """
    by = forbidden_by()
    if by is None:
        return
    frames = [frame for frame in traceback.extract_stack()[:-1] if f"{os.sep}torch{os.sep}" not in frame.filename]
    callers = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    # The public call: the first function of this package that the last line outside of it has entered.
    entered = frames[frames.index(callers[-1]) + 1 :] if callers else frames
    raise JitFrozenError(name, by, reason, entered[0].name if entered else "", tuple(callers))
