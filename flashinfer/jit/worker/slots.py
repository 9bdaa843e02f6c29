"""Compile slots: a limit on the compilers that run on this machine at once, across all processes of a user.

Every compiler and linker holds a slot: a locked file in a directory that all processes of a user share. The
kernel releases a lock however its process ends, so no slot is ever lost. The queue for slots is a lock too:
only its holder checks running units and memory. So later units cannot starve a unit that needs much memory. These locks are flock calls, because importing filelock takes too long for a program that runs before
every compiler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from . import available_memory, open_lock, process_problem, read_note, resident_memory, try_lock, write_note

POLL = 0.02  # seconds between two attempts


def take_slot(folder: str, limit: int, expected: int, check: Callable[[], None] = lambda: None) -> int:
    """Wait for a slot for a unit that needs ``expected`` bytes, and return its number.

    The process holds the slot to its end. At most ``limit`` units run. A unit that does not fit into the
    memory next to the others waits until it runs alone. ``check`` is called between attempts.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        queue = open_lock(f"{folder}/turn")
        while True:
            check()
            if has_queue := try_lock(queue):
                write_note(queue, {"pid": os.getpid()})
            # A stopped process at the head of the queue must not stop the machine.
            may_take = has_queue or process_problem(read_note(queue).get("pid")) == "stopped"
            if may_take and (slot := free_slot(folder, limit, expected, has_queue)) is not None:
                os.close(queue)
                return slot[0]
            time.sleep(POLL)
    except OSError:
        return 0  # no locks, or no directory for them: compiling without a limit is better than no build


def free_slot(folder: str, limit: int, expected: int, has_queue: bool = True) -> tuple[int, int] | None:
    """Return number and descriptor of a slot that was just locked, or ``None`` if the unit has to wait."""
    # Without the queue's lock (not ``has_queue``), its stopped holder may have a slot whose note is missing or
    # outdated.
    running: list[dict[str, int]] = []
    free: tuple[int, int] | None = None
    slots = sum(name.startswith("slot.") for name in os.listdir(folder))
    for number in range(slots + 1):
        if number == slots and free is not None:
            break  # add a slot only if none is free, not at every attempt
        descriptor = open_lock(f"{folder}/slot.{number}")
        is_free = try_lock(descriptor)
        if is_free and free is None:
            free = number, descriptor
            write_note(descriptor, {"pid": os.getpid()})
            continue
        if not is_free:
            state = process_problem((note := read_note(descriptor)).get("pid"))
            if not state or (has_queue and state == "gone"):
                running.append(note)
        os.close(descriptor)
    if free is not None and running and (len(running) >= limit or not _fits(expected, running)):
        os.close(free[1])
        free = None
    if free is not None:
        write_note(free[1], {"pid": os.getpid(), "group": os.getpgrp(), "expected": expected})
    return free


def _fits(expected: int, running: list[dict[str, int]]) -> bool:
    """Return whether one more unit fits into memory once the running ones reach their expected size."""
    available = available_memory()
    needs = {note.get("group", -1): note.get("expected", 0) for note in running}
    if available is None or expected + sum(needs.values()) <= available:
        return True
    has = resident_memory(set(needs))
    growth = sum(max(0, need - has[group]) for group, need in needs.items())
    return expected + growth <= available
