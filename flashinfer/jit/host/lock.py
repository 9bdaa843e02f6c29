"""Locks of builds: local to this machine, and each says who holds it and how far it has come.

They save work; nothing is wrong without them. A build directory is named by a token in the lock's file: whoever
shares the lock resumes in the directory, and another host, user or container builds in one of its own. ninja inherits
the locks of its run: a directory stays locked until the last process that writes there has ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ... import env
from ...errors import JitTimeoutError
from ..budget import open_lock, read_note, trouble, try_lock, write_note
from ..events import emit, say
from ..machine import trust

FIRST_WORD, NEXT_WORDS = 10.0, 30.0  # seconds until a waiting process says so, and between its later words
PATIENCE = 30.0  # seconds for which an owner may be stopped, or gone without its lock, until somebody else builds
POLL, LOOK = 0.05, 0.5  # seconds between two tries, and between two looks for what was published meanwhile

_ours: set[int] = set()  # descriptors that a forked child must not keep: with them it would hold the lock


def _let_go_in_child() -> None:
    for descriptor in _ours:
        with suppress(OSError):
            os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def runtime_directory() -> Path | None:
    """The private directory for locks and compile slots of this user on this machine, or ``None``."""
    for base in env.runtime_dirs():
        path = base / f"flashinfer-{os.geteuid()}"
        with suppress(OSError):
            trust.make_directories(base)
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            # In a directory that all can write, somebody else may have made it first.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                return path
    return None


class Hold:
    """A build that is ours: its lock (none where there are none: ``descriptor`` -1) and its token."""

    def __init__(self, descriptor: int, note: dict[str, Any], path: Path | None = None) -> None:
        self.descriptor, self.note, self.path, self.token = descriptor, note, path, str(note.get("token"))
        if descriptor >= 0:
            _ours.add(descriptor)

    def say(self, done: int, total: int) -> None:
        """Tell whoever waits how far this build is."""
        self.note |= {"done": done, "total": total}
        if self.descriptor in _ours:
            with suppress(OSError):
                write_note(self.descriptor, self.note)

    def release(self) -> None:
        """It is done, and nothing writes in the directory any more: let the next one in, with a lock of its own."""
        if self.path is not None and self.descriptor in _ours:
            with suppress(OSError):
                self.path.unlink()
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.abandon()

    def abandon(self) -> None:
        """Let the next one in as soon as every process that inherited the lock has ended."""
        if self.descriptor in _ours:
            _ours.discard(self.descriptor)
            with suppress(OSError):
                os.close(self.descriptor)
        self.descriptor = -1


def try_hold(name: str, module: str, generation: int = 0) -> Hold | None:
    """The build of that name, or ``None`` while somebody else has it. Where locks do not work it is ours alone."""
    path = _path(name, generation)
    try:
        while path is not None:
            descriptor = open_lock(path)
            try:
                if not try_lock(descriptor):
                    os.close(descriptor)
                    return None
                if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    note = _note(module, read_note(descriptor))
                    write_note(descriptor, note)
                    return Hold(descriptor, note, path)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # removed by somebody in this very moment: the next one has another file
    except OSError:
        pass
    return Hold(-1, _note(module, {}))


def _path(name: str, generation: int) -> Path | None:
    folder, digest = runtime_directory(), hashlib.sha256(name.encode()).hexdigest()[:32]
    return folder / f"{digest}.{generation}.lock" if folder else None


def _note(module: str, before: dict[str, Any]) -> dict[str, Any]:
    token, place = before.get("token"), _place()
    # A file that came with an image, or with a copy of a disk, says nothing: the same one may be in use elsewhere.
    if not isinstance(token, str) or not token.isalnum() or before.get("place") != place:
        token = secrets.token_hex(6)
    return {"token": token, "module": module, "host": socket.gethostname(), "pid": os.getpid(), "place": place}


@cache
def _place() -> str:
    """Where numbers of processes mean what they mean here: this boot of this machine, this container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


class Owner:
    """Who holds a lock, as far as its note says."""

    def __init__(self, name: str, generation: int) -> None:
        self.note: dict[str, Any] = {}
        with suppress(OSError, TypeError), open(_path(name, generation)) as file:  # type: ignore[arg-type]
            self.note = read_note(file.fileno())

    @property
    def trouble(self) -> str:
        """``stopped``, ``gone`` or nothing. Of a process in another container nothing is known."""
        return trouble(self.note.get("pid")) if _place() and self.note.get("place") == _place() else ""

    def __str__(self) -> str:
        return f"pid {self.note['pid']} on {self.note['host']}" if "pid" in self.note else "another process"


def wait(name: str, module: str, published: Callable[[], bool]) -> Hold | None:
    """Wait for somebody else's build, and say so. ``None``: its artifact is there; a hold: now it is ours to build.

    After ``PATIENCE`` with an owner that is stopped, or whose lock outlives it, the next generation of the lock lets
    one of those who wait build in another directory.

    Raises:
        JitTimeoutError: ``FLASHINFER_JIT_TIMEOUT`` has passed.
    """
    started = heard = looked = trouble_since = time.monotonic()
    next_word, generation, deadline = FIRST_WORD, 0, env.JIT_TIMEOUT.get()
    owner = Owner(name, generation)
    while True:
        seen = Owner(name, generation)
        owner = seen if seen.note else owner
        hold, now = try_hold(name, module, generation), time.monotonic()
        is_time = hold is None and now - looked >= LOOK
        if hold is not None or (is_time and published()):
            emit("wait", module, ms=(now - heard) * 1e3, owner=str(owner))
            return hold
        waited, problem = now - started, seen.trouble
        looked, trouble_since = now if is_time else looked, trouble_since if problem else now
        late = deadline is not None and waited >= deadline
        if waited >= next_word or late:
            steps = {key: owner.note[key] for key in ("done", "total") if key in owner.note}
            emit("wait", module, ms=(now - heard) * 1e3, owner=str(owner), trouble=problem, **steps)
            at = f", {steps['done']} of {steps['total']} steps done" if len(steps) == 2 else ""
            is_so = f" and is {problem}" if problem else ""
            text = f"{module}, which {owner} is building{is_so}: {waited:.0f} s{at}"
            if late:
                raise JitTimeoutError(module, f"waited for {text}; FLASHINFER_JIT_TIMEOUT={deadline:g} has passed")
            say(f"waiting for {text}")
            next_word, heard = waited + NEXT_WORDS, now
        if now - trouble_since >= PATIENCE:
            say(f"{module}: {owner} is {problem} since {PATIENCE:g} s; building it here")
            generation, trouble_since = generation + 1, now
        else:
            time.sleep(POLL)
