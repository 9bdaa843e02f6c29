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
from collections import namedtuple
from contextlib import suppress

from .notes import read_note, write_note
from .procfs import available_memory, resident, stopped, trouble

TYPE_CHECKING = False  # a name that mypy knows: importing typing would take a third of what all else takes
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

POLL = 0.02  # seconds between two looks

# A slot is held until this process ends. Without a lock (``descriptor`` -1) nothing is counted.
Slot = namedtuple("Slot", ["number", "descriptor"])


def try_lock(descriptor: int) -> bool:
    """Whether the lock of an open file is ours now.

    Raises:
        OSError: this file system has no locks. It does not mean that somebody else has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_lock(path: str | Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def share(descriptor: int) -> None:
    """Have part in a file that many have, until it is closed; see :func:`is_shared`."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_shared(path: str | Path) -> bool:
    """Whether somebody has part in a file, or nobody can tell: its file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def take_slot(folder: str, limit: int, expected: int, check: Callable[[], None] = lambda: None) -> Slot:
    """Wait for a slot for a unit that needs ``expected`` bytes. ``check`` is called now and then meanwhile.

    At most ``limit`` units run; a unit that does not fit into the memory beside the others runs when it is alone.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        turn = open_lock(f"{folder}/turn")
        while True:
            check()
            if mine := try_lock(turn):
                write_note(turn, {"pid": os.getpid()})
            # A process that is stopped in its turn must not stop the machine.
            if mine or stopped(read_note(turn).get("pid")):
                slot = _free_slot(folder, limit, expected, mine)
                if slot is not None:
                    os.close(turn)
                    return slot
            time.sleep(POLL)
    except OSError:
        return Slot(0, -1)  # no locks, or no place for them: compile without a budget rather than not at all


def _free_slot(folder: str, limit: int, expected: int, mine: bool = True) -> Slot | None:
    # Where the turn is not ``mine``, whoever is stopped in it may have a slot with no note yet, or one of the past.
    running: list[dict[str, Any]] = []
    free: Slot | None = None
    slots = sum(name.startswith("slot.") for name in os.listdir(folder))
    for number in range(slots + 1):
        if number == slots and free is not None:
            break  # one more is made where none is free, not at every look
        descriptor = open_lock(f"{folder}/slot.{number}")
        if free is None and try_lock(descriptor):
            free = Slot(number, descriptor)
            write_note(descriptor, {"pid": os.getpid()})
            continue
        if not try_lock(descriptor):
            state = trouble((note := read_note(descriptor)).get("pid"))
            if not state or (mine and state == "gone"):
                running.append(note)
        os.close(descriptor)
    if free is not None and (not running or (len(running) < limit and _fits(expected, running))):
        write_note(free.descriptor, {"pid": os.getpid(), "group": os.getpgrp(), "expected": expected})
        return free
    if free is not None:
        os.close(free.descriptor)
    return None


def _fits(expected: int, running: list[dict[str, Any]]) -> bool:
    """Whether the memory has room for one more, when those that run have grown to what they will need."""
    available = available_memory()
    needs = {note.get("group", -1): note.get("expected", 0) for note in running}
    if available is None or expected + sum(needs.values()) <= available:
        return True
    has = resident(set(needs))
    growth = sum(max(0, int(need) - has.get(group, 0)) for group, need in needs.items())
    return expected + growth <= available
