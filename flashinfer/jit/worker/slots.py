"""Compile slots bound how many compilers are alive on this machine at once, whoever started them.

Every compiler and linker runs under a slot: a locked file in a directory that all processes of a user share. The
kernel takes a lock back however its process ends, so no slot is ever lost. To wait for one's turn is a lock too: one
process at a time looks at what runs and at the memory, and the next unit waits behind a heavy one instead of starving
it. These locks are the kernel's own and not filelock's, which a program before every compiler has no time to import.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress

from .notes import read_note, write_note
from .procfs import available_memory, resident, trouble

POLL = 0.02  # seconds between two looks


def try_lock(descriptor: int) -> bool:
    """Whether the lock of an open file is ours now.

    Raises:
        OSError: this file system has no locks. It does not mean that somebody else has it.
    """
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file, or make it; whatever the umask, this user's other processes can open it too."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def share(descriptor: int) -> None:
    """Have part in a file that many have, until it is closed; see :func:`is_shared`."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Whether somebody has part in a file, or nobody can tell: its file system has no locks."""
    with suppress(OSError), open(path) as file:
        try:
            return not try_lock(file.fileno())
        except OSError:
            return True
    return False


def take_slot(folder: str, limit: int, expected: int, check: Callable[[], None] = lambda: None) -> int:
    """Wait for a slot, which is this process's until it ends, for a unit that needs ``expected`` bytes; the slot's number.

    At most ``limit`` units run; a unit that does not fit into the memory beside the others runs when it is alone.
    ``check`` is called now and then meanwhile.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        turn = open_lock(f"{folder}/turn")
        while True:
            check()
            if mine := try_lock(turn):
                write_note(turn, {"pid": os.getpid()})
            # A process that is stopped in its turn must not stop the machine.
            may_look = mine or trouble(read_note(turn).get("pid")) == "stopped"
            if may_look and (slot := _free_slot(folder, limit, expected, mine)) is not None:
                os.close(turn)
                return slot[0]
            time.sleep(POLL)
    except OSError:
        return 0  # no locks, or no place for them: compile without a budget rather than not at all


def _free_slot(folder: str, limit: int, expected: int, mine: bool = True) -> tuple[int, int] | None:
    """Number and descriptor of a slot that is locked now, or ``None`` where the unit has to wait."""
    # Where the turn is not ``mine``, whoever is stopped in it may have a slot with no note yet, or one of the past.
    running: list[dict[str, int]] = []
    free: tuple[int, int] | None = None
    slots = sum(name.startswith("slot.") for name in os.listdir(folder))
    for number in range(slots + 1):
        if number == slots and free is not None:
            break  # one more is made where none is free, not at every look
        descriptor = open_lock(f"{folder}/slot.{number}")
        is_free = try_lock(descriptor)
        if is_free and free is None:
            free = number, descriptor
            write_note(descriptor, {"pid": os.getpid()})
            continue
        if not is_free:
            state = trouble((note := read_note(descriptor)).get("pid"))
            if not state or (mine and state == "gone"):
                running.append(note)
        os.close(descriptor)
    if free is not None and running and (len(running) >= limit or not _fits(expected, running)):
        os.close(free[1])
        free = None
    if free is not None:
        write_note(free[1], {"pid": os.getpid(), "group": os.getpgrp(), "expected": expected})
    return free


def _fits(expected: int, running: list[dict[str, int]]) -> bool:
    """Whether the memory has room for one more, when those that run have grown to what they will need."""
    available = available_memory()
    needs = {note.get("group", -1): note.get("expected", 0) for note in running}
    if available is None or expected + sum(needs.values()) <= available:
        return True
    has = resident(set(needs))
    growth = sum(max(0, need - has[group]) for group, need in needs.items())
    return expected + growth <= available
