"""How many compilers may be alive on this machine at once, whoever started them.

Every compiler and linker runs under a slot: a locked file in a directory that all processes of a user share. The
kernel takes a lock back however its process ends, so no slot is ever lost. To wait for one's turn is a lock too: one
process at a time looks at what runs and at the memory, and the next unit waits behind a heavy one instead of starving
it. Little of the standard library is used: ``unit`` runs this in front of every compiler.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections import namedtuple

TYPE_CHECKING = False  # a name that mypy knows: importing typing would take a third of what all else takes
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

POLL = 0.02  # seconds between two looks
PROC, CGROUPS = "/proc", "/sys/fs/cgroup"


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
    has = _resident(set(needs))
    growth = sum(max(0, int(need) - has.get(group, 0)) for group, need in needs.items())
    return expected + growth <= available


def _resident(groups: set[int]) -> dict[int, int]:
    """Bytes in memory of the processes of each process group."""
    sums: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir(PROC)):
        fields = _stat(name)
        if fields and int(fields[2]) in groups:
            group = int(fields[2])
            sums[group] = sums.get(group, 0) + int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return sums


def _stat(pid: object) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty where there is no such process."""
    return _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()


def trouble(pid: object) -> str:
    """``stopped`` (by SIGSTOP or a debugger), ``gone`` or nothing, of a process of this machine."""
    state = (_stat(pid) or ["X"])[0]
    return "stopped" if state in "Tt" else "gone" if state in "ZX" else ""


def stopped(pid: object) -> bool:
    return trouble(pid) == "stopped"


def cpu_limit() -> int:
    """CPUs at hand: those that this process may run on, and no more than its cgroups' quotas give."""
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _cgroups("cpu"):
        version_1 = " ".join(_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        quota, _, period = (_read(f"{folder}/cpu.max").strip() or version_1).partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return max(1, int(min(limits)))


def available_memory() -> int | None:
    """Bytes that a new process can use: what the machine has left, and what each of our cgroups has."""
    left = [int(line.split()[1]) * 1024 for line in _read(f"{PROC}/meminfo").splitlines() if "MemAvailable" in line]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder in _cgroups("memory"):
        for limit, usage, inactive in [("memory.max", "memory.current", "inactive_file"), version_1]:
            most, used = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{usage}").strip()
            if most.isdigit() and used.isdigit():
                # Pages of files that nobody uses are given back before anybody is killed.
                stat = dict(line.split()[:2] for line in _read(f"{folder}/memory.stat").splitlines())
                left.append(int(most) - int(used) + int(stat.get(inactive, 0)))
    return min(left, default=None)


def _cgroups(controller: str) -> Iterator[str]:
    """The directories of this process's cgroup and of those around it, of version 2 and of version 1."""
    for number, names, path in re.findall(r"^(\d+):(.*?):(.*)$", _read(f"{PROC}/self/cgroup"), re.MULTILINE):
        if controller not in names.split(",") and (number, names) != ("0", ""):
            continue
        root, path = os.path.join(CGROUPS, controller if names else ""), path.strip("/")
        yield root
        while path:
            yield os.path.join(root, path)
            path = os.path.dirname(path)


def open_lock(path: str | Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def read_note(descriptor: int) -> dict[str, Any]:
    """What the holder of a lock says of itself; empty where that cannot be read, or is just being written."""
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(descriptor: int, note: dict[str, Any]) -> None:
    data = json.dumps(note).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
