"""What the build system tells: lines for a person on standard error, events for a program.

Events: ``hit``, ``miss`` (``reason``), ``wait`` (``owner``), ``compile`` (``seconds``) and ``load`` (``ms``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import env


@dataclass(frozen=True)
class Event:
    """One thing that happened to one module."""

    kind: str
    module: str
    detail: dict[str, Any] = field(default_factory=dict)


_subscribers: list[Callable[[Event], None]] = []
_logger = logging.getLogger("flashinfer")


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``callback`` with every event of this process from now on; the function returned ends that."""
    _subscribers.append(callback)
    return lambda: _subscribers.remove(callback)


def emit(kind: str, module: str, **detail: Any) -> None:
    """Tell every subscriber and, at its level, the logger ``flashinfer``."""
    event = Event(kind, module, detail)
    for callback in tuple(_subscribers):
        callback(event)
    if not _logger.handlers and not _logger.level:
        _logger.setLevel(env.LOGGING_LEVEL.get())
    _logger.info("%s %s %s", kind, module, " ".join(f"{key}={value}" for key, value in detail.items()))


def say(text: str) -> None:
    """One line for whoever watches this process."""
    print(f"flashinfer: {text}", file=sys.stderr, flush=True)
