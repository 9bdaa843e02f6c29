"""Locks of builds. They are local to this machine, and next to each is a note about its holder and progress.

Locks save work, but nothing breaks without them. A token in the note names the build directory. The next
holder of the lock resumes in that directory, while another host, user or container builds in its own. No
child of a builder inherits its lock. Compilers end with their builder (see ``worker``). Until they
have ended, nobody else builds in their directory.
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

from .. import env
from ..errors import JitTimeoutError, ReentrantBuildError
from .events import emit
from .machine import trust
from .report import say
from .worker import open_lock, process_problem, read_note_at, try_lock, write_note

FIRST_REPORT, NEXT_REPORTS = 10.0, 30.0  # seconds of waiting before a report, and between later ones
PATIENCE = 30.0  # seconds before others build for an owner that is stopped, or that ended and still has the lock
POLL, LOOKUP_INTERVAL = 0.05, 0.5  # seconds between two attempts, and between two lookups


class _Claim:
    """A claim on a lock by the holder or an attempt, valid as long as it is referenced."""


# (lock, thread) -> claim of this process. A forked child has none.
_claims = WeakValueDictionary[tuple[str, int], _Claim]()
os.register_at_fork(after_in_child=_claims.clear)


def runtime_directory() -> Path | None:
    """Return this user's private directory for locks and compile slots on this machine, or ``None``."""
    for base in env.runtime_dirs():
        path = base / f"flashinfer-{os.geteuid()}"
        with suppress(OSError):
            trust.make_directories(base)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                path.chmod(0o700)  # whatever the umask
            status = path.lstat()
            # If everybody can write ``base``, another user may have made the directory first.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                return path
    return None


class Hold:
    """A build that this process owns: its note, and its lock (``None`` on a file system without locks)."""

    def __init__(self, module: str, lock: FileLock | None = None, claim: _Claim | None = None) -> None:
        self.lock, self.claim = lock, claim
        self.note = dict[str, Any]()
        before = read_note_at(_note_path(lock.lock_file)) if lock is not None else {}
        # A note from an image or a copied disk does not count, because its directory may be in use elsewhere.
        known_token = before.get("token") if before.get("namespace") == pid_namespace() else None
        token = known_token if isinstance(known_token, str) and known_token.isalnum() else _new_token()
        self.update_note(
            token=token, module=module, host=socket.gethostname(), pid=os.getpid(), namespace=pid_namespace()
        )

    @property
    def token(self) -> str:
        return str(self.note["token"])

    def renew(self) -> None:
        """Build in a new directory."""
        self.update_note(token=_new_token())

    def update_note(self, **more: str | int) -> None:
        """Update the note for processes that wait and for the next holder."""
        self.note |= more
        if self.lock is not None and self.lock.is_locked:  # not so in a forked child
            with suppress(OSError), os.fdopen(open_lock(_note_path(self.lock.lock_file))) as file:
                write_note(file.fileno(), self.note)

    def release(self) -> None:
        """Release the lock after a complete build.

        The next holder starts with a new lock and a new directory.
        """
        if self.lock is not None and self.lock.is_locked:
            for path in (_note_path(self.lock.lock_file), self.lock.lock_file):
                with suppress(OSError):
                    os.unlink(path)  # a process that has it open already notices that, and opens a new one
        self.abandon()

    def abandon(self) -> None:
        """Release the lock after an incomplete build. The next holder resumes in the same directory."""
        if self.lock is not None:
            self.lock.release()
        self.claim = None


def _new_token() -> str:
    return os.urandom(6).hex()  # a user's file may shadow the module ``secrets``


def try_hold(name: str, module: str, generation: int = 0, patience: float = 0.0) -> Hold | None:
    """Take the lock ``name`` and return its hold, or ``None`` while another process has the lock.

    On a file system without locks, return a hold without a lock.

    Raises:
        ReentrantBuildError: this thread already has the lock further up its stack, and would wait for itself.
    """
    if (name, threading.get_ident()) in _claims:
        raise ReentrantBuildError(module)
    # The claim comes before the lock, because a signal handler may try in between.
    claim = _claims[name, threading.get_ident()] = _Claim()
    with suppress(OSError):
        lock = _try_lock(_path(name, generation), patience)
        return Hold(module, lock, claim) if lock is not None else None
    return Hold(module)


@contextmanager
def exclusive(what: str, patience: float = 0.0) -> Iterator[bool]:
    """Yield True if this process holds the lock of the task ``what``. Wait at most ``patience`` seconds for it.

    On a file system without locks, yield True.
    """
    hold = None
    with suppress(ReentrantBuildError):  # a signal handler in a thread that has it
        hold = try_hold(what, "", patience=patience)
    try:
        yield hold is not None
    finally:
        if hold is not None:
            hold.release()


def _try_lock(path: Path, patience: float) -> FileLock | None:
    """Return the lock of a file, or ``None`` if another process holds it for ``patience`` seconds.

    Raises:
        OSError: this file system has no locks, which does not mean that another process holds it.
    """
    lock = FileLock(path, timeout=patience, poll_interval=POLL, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        # A policy that forbids locks also causes EACCES, which filelock takes for "busy".
        with os.fdopen(open_lock(path)) as file:
            try_lock(file.fileno())
        return None
    return lock


def _path(name: str, generation: int) -> Path:
    if (folder := runtime_directory()) is None:
        raise OSError("there is no directory for locks")
    return folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.{generation}.lock"


def _note_path(path: str | Path) -> str:
    return f"{os.fspath(path).removesuffix('.lock')}.note"


@cache
def pid_namespace() -> str:
    """Return an identifier of the boot and the container in which process numbers are valid."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def wait(name: str, module: str, published: Callable[[], bool]) -> Hold | None:
    """Wait for another process's build, and report the wait.

    Return ``None`` after its publication, or a hold if this process must build the module. An owner may be
    stopped for ``PATIENCE``, or end without releasing its lock. Then one of the waiting processes takes the
    lock of the next generation and builds in another directory.

    Raises:
        JitTimeoutError: ``FLASHINFER_JIT_TIMEOUT`` has passed.
    """
    started = time.monotonic()
    reported = trouble_since = next_lookup = started
    next_report, deadline = FIRST_REPORT, env.JIT_TIMEOUT.get() or math.inf
    generation = 0
    note, seen = dict[str, Any](), dict[str, Any]()
    while True:
        with suppress(OSError):
            seen = read_note_at(_note_path(_path(name, generation)))
        note = seen or note
        owner = f"pid {note['pid']} on {note['host']}" if "pid" in note else "another process"
        # The state of a process in another container is unknown.
        problem = (
            process_problem(seen.get("pid")) if pid_namespace() and seen.get("namespace") == pid_namespace() else ""
        )
        hold, now = try_hold(name, module, generation), time.monotonic()
        if hold is not None or (now >= next_lookup and published()):
            emit("wait", module, ms=(now - reported) * 1e3, owner=owner)
            return hold
        if now >= next_lookup:
            next_lookup = now + LOOKUP_INTERVAL
        if not problem:
            trouble_since = now
        waited = now - started
        if waited >= min(next_report, deadline):
            steps = {key: note[key] for key in ("done", "total") if key in note}
            emit("wait", module, ms=(now - reported) * 1e3, owner=owner, trouble=problem, **steps)
            at = f", {steps['done']} of {steps['total']} steps done" if len(steps) == 2 else ""
            is_so = f" and is {problem}" if problem else ""
            text = f"{module}, which {owner} is building{is_so}: {waited:.0f} s{at}"
            if waited >= deadline:
                raise JitTimeoutError(module, f"waited for {text}; FLASHINFER_JIT_TIMEOUT={deadline:g} has passed")
            say(f"waiting for {text}")
            next_report, reported = waited + NEXT_REPORTS, now
        if now - trouble_since >= PATIENCE:
            say(f"{module}: {owner} is {problem} since {PATIENCE:g} s; building it here")
            generation, trouble_since = generation + 1, now
        else:
            time.sleep(POLL)
