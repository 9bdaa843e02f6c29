"""Messages for the user: the only file that writes to standard error.

A failed write never affects the caller. With a terminal that is gone, a closed pipe, a full disk or an unusual
``sys.stderr``, only the text is lost.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_logger = logging.getLogger("flashinfer")


def write(text: str) -> None:
    """Write text to standard error, or lose it."""
    stream: Any = sys.stderr  # None if descriptor 2 is closed: print() would use standard output instead
    try:
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            # Write past the buffer: its lock outlives a fork, a signal handler cannot enter it twice, and
            # unwritten data fails again when the interpreter ends.
            data = text.encode(stream.encoding, stream.errors or "strict")
            while data:
                data = data[os.write(stream.fileno(), data) :]
        elif stream is not None:
            stream.write(text)
            stream.flush()
    except Exception:
        return


def say(text: str) -> None:
    """Write one line that names this library."""
    write(f"flashinfer: {text}\n")


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal. If it cannot tell, the answer is no."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:
        return False


def warn(text: str) -> None:
    """Warn the caller of the caller. Only a filter that makes warnings errors raises."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        raise
    except Exception:  # a closed standard error
        return


def log(level: int, text: str, *arguments: object, error: bool = False) -> None:
    """Log a message. A handler's failure does not affect the build."""
    try:
        _logger.log(level, text, *arguments, exc_info=error, stacklevel=2)
    except Exception:
        return


def guarded(display: Callable[[T], object]) -> Callable[[T], None]:
    """Return a display that is not called again after its first failure."""
    works = True

    def call(progress: T) -> None:
        nonlocal works
        try:
            if works:
                display(progress)
        except Exception:
            works = False
            log(logging.WARNING, "the display of a build failed", error=True)

    return call
