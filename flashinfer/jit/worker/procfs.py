"""State of processes, and the CPUs and memory available, from /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

PROC, CGROUPS = "/proc", "/sys/fs/cgroup"


def resident(groups: set[int]) -> dict[int, int]:
    """Return the bytes in memory of each process group."""
    sums = dict.fromkeys(groups, 0)
    for name in filter(str.isdigit, os.listdir(PROC)):
        if (fields := _stat(name)) and (group := int(fields[2])) in groups:
            sums[group] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return sums


def _stat(pid: object) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on. They are empty if the process is gone."""
    return _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()


def trouble(pid: object) -> str:
    """Return ``stopped`` (by SIGSTOP or a debugger), ``gone`` or an empty string for a local process."""
    state = (_stat(pid) or ["X"])[0]
    return "stopped" if state in "Tt" else "gone" if state in "ZX" else ""


def cpu_limit() -> int:
    """Return the number of usable CPUs: this process's affinity, limited by the quotas of its cgroups."""
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _cgroups("cpu"):
        version_1 = " ".join(_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        quota, _, period = (_read(f"{folder}/cpu.max").strip() or version_1).partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return max(1, int(min(limits)))


def available_memory() -> int | None:
    """Return the bytes that a new process can use: the least free memory of the machine and each cgroup."""
    left = [int(line.split()[1]) * 1024 for line in _read(f"{PROC}/meminfo").splitlines() if "MemAvailable" in line]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder in _cgroups("memory"):
        for limit, usage, inactive in [("memory.max", "memory.current", "inactive_file"), version_1]:
            most, used = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{usage}").strip()
            if most.isdigit() and used.isdigit():
                # The kernel frees inactive pages of files before it kills a process.
                stat = dict(line.split()[:2] for line in _read(f"{folder}/memory.stat").splitlines())
                left.append(int(most) - int(used) + int(stat.get(inactive, 0)))
    return min(left, default=None)


def _cgroups(controller: str) -> Iterator[str]:
    """Yield the directories of this process's cgroup and of its parents, for versions 2 and 1."""
    for number, names, path in re.findall(r"^(\d+):(.*?):(.*)$", _read(f"{PROC}/self/cgroup"), re.MULTILINE):
        if controller not in names.split(",") and (number, names) != ("0", ""):
            continue
        root, path = os.path.join(CGROUPS, controller if names else ""), path.strip("/")
        yield root
        while path:
            yield os.path.join(root, path)
            path = os.path.dirname(path)


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
