"""A lock that says whom it waits for. It saves work; nothing is wrong without it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .events import emit, say
from .workspace import write_atomically

if TYPE_CHECKING:
    from filelock import BaseFileLock

FIRST_WORD, NEXT_WORDS = 10.0, 30.0  # seconds until a waiting process says so, and between its later words


@contextmanager
def held(path: Path, module: str) -> Iterator[BaseFileLock]:
    """Hold the lock of one build. Whoever waits says for what, for whom and how long already.

    Leaving the block, or the owner's ``release()`` before that, lets the next one in.
    """
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, thread_local=False)
    started, patience = time.monotonic(), FIRST_WORD
    while True:
        try:
            lock.acquire(timeout=patience)
            break
        except filelock.Timeout:
            owner = _owner(path)
            waited = time.monotonic() - started
            emit("wait", module, owner=owner, seconds=round(waited, 1))
            say(f"waiting for {module}, which {owner} is building: {waited:.0f} s")
            patience = NEXT_WORDS
    try:
        note = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        write_atomically(_note_of(path), json.dumps(note).encode())
        yield lock
    finally:
        lock.release(force=True)


def _note_of(path: Path) -> Path:
    return path.with_suffix(".owner")


def _owner(path: Path) -> str:
    try:
        note = json.loads(_note_of(path).read_text())
        return f"pid {note['pid']} on {note['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
