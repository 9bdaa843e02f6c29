"""Events of modules: subscribers, a file and the logger receive them, and ``stats`` sums them.

Kinds: ``hit`` (``path``), ``miss`` (``reason``), ``fetch`` (``url``, ``bytes``), ``wait`` (``owner``),
``compile`` and ``load`` (``path``). ``ms`` is the duration of the lookup, fetch, compilation or load. For a wait, it is
the time since the last event of that wait.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import env
from .report import log, say


@dataclass(frozen=True)
class Event:
    """One event of one module: ``time`` in seconds since 1970, ``ms`` in milliseconds."""

    kind: str
    module: str
    ms: float
    time: float
    pid: int
    host: str
    detail: dict[str, Any] = field(default_factory=dict)


_subscribers: list[Callable[[Event], None]] = []
_sums: dict[tuple[str, str], tuple[int, float]] = {}  # (module, kind) -> count, milliseconds
_unwritable: set[Path] = set()  # files whose error was reported
guard = threading.RLock()  # reentrant, because a signal handler may emit while its thread does
_logger = logging.getLogger("flashinfer")
_host = os.uname().nodename


def _start_afresh() -> None:
    """Reset the sums and the lock in a forked child, which lacks the thread that may hold the lock."""
    global guard
    guard = threading.RLock()
    _sums.clear()


os.register_at_fork(after_in_child=_start_afresh)


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``callback`` with every event, in the event's thread. Return a function that unsubscribes it.

    Its exceptions are logged.
    """
    _subscribers.append(callback)
    return lambda: _subscribers.remove(callback) if callback in _subscribers else None


def stats() -> dict[str, dict[str, dict[str, Any]]]:
    """Return counts and times of this process, by ``"kinds"`` and by ``"modules"`` and kinds."""
    with guard:
        sums = dict(_sums)
    result: dict[str, dict[str, dict[str, Any]]] = {"kinds": {}, "modules": {}}
    for (module, kind), (count, ms) in sums.items():
        for table in (result["kinds"], result["modules"].setdefault(module, {})):
            one = table.setdefault(kind, {"count": 0, "ms": 0.0})
            one["count"], one["ms"] = one["count"] + count, round(one["ms"] + ms, 3)
    return result


def emit(kind: str, module: str, ms: float = 0.0, **detail: Any) -> None:
    """Count an event. Pass it to all subscribers, FLASHINFER_JIT_EVENTS and the logger ``flashinfer``."""
    event = Event(kind, module, round(ms, 3), time.time(), os.getpid(), _host, detail)
    with guard:
        count, total = _sums.get((module, kind), (0, 0.0))
        _sums[module, kind] = count + 1, total + event.ms
    for callback in tuple(_subscribers):
        try:
            callback(event)
        except Exception:  # a subscriber's error must not fail the module
            log(logging.ERROR, "a subscriber failed on %s of %s", kind, module, error=True)
    if (file := env.JIT_EVENTS.get()) is not None:
        _append(file, {**vars(event), **detail})
    if not _logger.handlers and not _logger.level:
        _logger.setLevel(env.LOGGING_LEVEL.get())
    if _logger.isEnabledFor(logging.INFO):
        details = " ".join(f"{key}={value}" for key, value in detail.items())
        log(logging.INFO, "%s %s %.1f ms %s", kind, module, ms, details)


def _append(file: Path, line: dict[str, Any]) -> None:
    """Append one line in one write, which the kernel does not mix with other processes' writes."""
    del line["detail"]
    data = json.dumps(line, default=str).encode() + b"\n"
    try:
        # O_NONBLOCK: a pipe without a reader is an error, not a wait.
        with open(file, "ab", 0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o644)) as stream:
            if stream.write(data) != len(data):
                raise OSError(28, "No space left on device")
    except OSError as err:
        if file not in _unwritable:
            _unwritable.add(file)
            say(f"events cannot be written to {file}: {err.strerror or err}")
