"""Locks of builds: local to this machine, and beside each a note of who holds it and how far it has come.

They save work; nothing is wrong without them. A build directory is named by a token in the note: whoever gets the
lock next resumes in the directory, and another host, user or container builds in one of its own. No child of a builder
has its lock: compilers end with their builder, see ``worker``, and until they have, nobody else builds where they write.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from filelock import FileLock, Timeout

from ... import env
from ...errors import JitTimeoutError, ReentrantBuildError
from ..events import emit
from ..machine import trust
from ..report import say
from ..worker.notes import read_note_at, write_note
from ..worker.procfs import trouble
from ..worker.slots import open_lock, try_lock

FIRST_WORD, NEXT_WORDS = 10.0, 30.0  # seconds until a waiting process says so, and between its later words
PATIENCE = 30.0  # seconds for which an owner may be stopped, or gone without its lock, until somebody else builds
POLL, LOOK = 0.05, 0.5  # seconds between two tries, and between two looks for what was published meanwhile


class _Claim:
    """Somebody has a lock, or tries to take it, as long as anything refers to this."""


# (lock, thread) -> claim. Of this process; a forked child has none.
_claims = WeakValueDictionary[tuple[str, int], _Claim]()
os.register_at_fork(after_in_child=_claims.clear)


def runtime_directory() -> Path | None:
    """The private directory for locks and compile slots of this user on this machine, or ``None``."""
    for base in env.runtime_dirs():
        path = base / f"flashinfer-{os.geteuid()}"
        with suppress(OSError):
            trust.make_directories(base)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                path.chmod(0o700)  # whatever the umask
            status = path.lstat()
            # In a directory that all can write, somebody else may have made it first.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                return path
    return None


class Hold:
    """A build that is ours: its lock (``None`` where there are none), the note beside it, and the token in that."""

    def __init__(self, module: str, lock: FileLock | None = None, claim: _Claim | None = None) -> None:
        self.lock, self.claim, self.note = lock, claim, dict[str, Any]()
        before = read_note_at(_beside(lock.lock_file)) if lock is not None else {}
        # A file that came with an image, or with a copy of a disk, says nothing: the same one may be in use elsewhere.
        known = before.get("token") if before.get("place") == place() else None
        token = known if isinstance(known, str) and known.isalnum() else _new_token()
        self.tell(token=token, module=module, host=socket.gethostname(), pid=os.getpid(), place=place())

    @property
    def token(self) -> str:
        return str(self.note["token"])

    def renew(self) -> None:
        """Build in another directory."""
        self.tell(token=_new_token())

    def tell(self, **more: str | int) -> None:
        """Add to the note, for whoever waits or comes next."""
        self.note |= more
        if self.lock is not None and self.lock.is_locked:  # in a forked child it is not
            with suppress(OSError), os.fdopen(open_lock(_beside(self.lock.lock_file))) as file:
                write_note(file.fileno(), self.note)

    def release(self) -> None:
        """It is done: let the next one in, with a lock and a directory of its own."""
        if self.lock is not None and self.lock.is_locked:
            for path in (_beside(self.lock.lock_file), self.lock.lock_file):
                with suppress(OSError):
                    os.unlink(path)  # who has it open already sees that, and opens another one
        self.abandon()

    def abandon(self) -> None:
        """Let the next one in, to go on where this one ended."""
        if self.lock is not None:
            self.lock.release()
        self.claim = None


def _new_token() -> str:
    return os.urandom(6).hex()  # not the module ``secrets``, as which a user's file may be imported


def try_hold(name: str, module: str, generation: int = 0, patience: float = 0.0) -> Hold | None:
    """Return the build of that name, or ``None`` while another owner has it. Where locks do not work it is ours.

    Raises:
        ReentrantBuildError: this very thread has it, further up its stack, and would wait for itself.
    """
    if (name, threading.get_ident()) in _claims:
        raise ReentrantBuildError(module)
    # Claimed before it is taken: a signal handler may ask in between.
    claim = _claims[name, threading.get_ident()] = _Claim()
    with suppress(OSError):
        lock = _try_lock(_path(name, generation), patience)
        return Hold(module, lock, claim) if lock is not None else None
    return Hold(module)


@contextmanager
def alone(what: str, patience: float = 0.0) -> Iterator[bool]:
    """Whether this process is the one of this machine that does ``what`` now, after ``patience`` seconds at most.

    Where locks do not work it is.
    """
    hold = None
    with suppress(ReentrantBuildError):  # a signal handler, while this thread does it
        hold = try_hold(what, "", patience=patience)
    try:
        yield hold is not None
    finally:
        if hold is not None:
            hold.release()


def _try_lock(path: Path, patience: float) -> FileLock | None:
    """The lock of a file, or ``None`` where somebody else has it all the time.

    Raises:
        OSError: this file system has no locks. It does not mean that somebody else has it.
    """
    lock = FileLock(path, timeout=patience, poll_interval=POLL, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        # A policy that forbids locks says EACCES too, which filelock takes for "busy".
        with os.fdopen(open_lock(path)) as file:
            try_lock(file.fileno())
        return None
    return lock


def _path(name: str, generation: int) -> Path:
    if (folder := runtime_directory()) is None:
        raise OSError("there is no directory for locks")
    return folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.{generation}.lock"


def _beside(path: str | Path) -> str:
    return f"{os.fspath(path).removesuffix('.lock')}.note"


@cache
def place() -> str:
    """Names where numbers of processes mean what they mean here: this boot of this machine, this container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def wait(name: str, module: str, published: Callable[[], bool]) -> Hold | None:
    """Wait for somebody else's build, and say so. ``None``: its artifact is there; a hold: now it is ours to build.

    After ``PATIENCE`` with an owner that is stopped, or whose lock outlives it, the next generation of the lock lets
    one of those who wait build in another directory.

    Raises:
        JitTimeoutError: ``FLASHINFER_JIT_TIMEOUT`` has passed.
    """
    started = heard = trouble_since = next_look = time.monotonic()
    next_word, generation, deadline = FIRST_WORD, 0, env.JIT_TIMEOUT.get() or math.inf
    note, seen = dict[str, Any](), dict[str, Any]()
    while True:
        with suppress(OSError):
            seen = read_note_at(_beside(_path(name, generation)))
        note = seen or note
        owner = f"pid {note['pid']} on {note['host']}" if "pid" in note else "another process"
        # Of a process in another container nothing is known.
        problem = trouble(seen.get("pid")) if place() and seen.get("place") == place() else ""
        hold, now = try_hold(name, module, generation), time.monotonic()
        if hold is not None or (now >= next_look and published()):
            emit("wait", module, ms=(now - heard) * 1e3, owner=owner)
            return hold
        if now >= next_look:
            next_look = now + LOOK
        if not problem:
            trouble_since = now
        waited = now - started
        if waited >= min(next_word, deadline):
            steps = {key: note[key] for key in ("done", "total") if key in note}
            emit("wait", module, ms=(now - heard) * 1e3, owner=owner, trouble=problem, **steps)
            at = f", {steps['done']} of {steps['total']} steps done" if len(steps) == 2 else ""
            is_so = f" and is {problem}" if problem else ""
            text = f"{module}, which {owner} is building{is_so}: {waited:.0f} s{at}"
            if waited >= deadline:
                raise JitTimeoutError(module, f"waited for {text}; FLASHINFER_JIT_TIMEOUT={deadline:g} has passed")
            say(f"waiting for {text}")
            next_word, heard = waited + NEXT_WORDS, now
        if now - trouble_since >= PATIENCE:
            say(f"{module}: {owner} is {problem} since {PATIENCE:g} s; building it here")
            generation, trouble_since = generation + 1, now
        else:
            time.sleep(POLL)
