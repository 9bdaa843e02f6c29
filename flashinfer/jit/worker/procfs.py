"""The kernel says in /proc and /sys/fs/cgroup how processes are, and which CPUs and memory are at hand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

PROC, CGROUPS = "/proc", "/sys/fs/cgroup"


def resident(groups: set[int]) -> dict[int, int]:
    """Bytes in memory of the processes of each process group."""
    sums = dict.fromkeys(groups, 0)
    for name in filter(str.isdigit, os.listdir(PROC)):
        if (fields := _stat(name)) and (group := int(fields[2])) in groups:
            sums[group] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return sums


def _stat(pid: object) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty where there is no such process."""
    return _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()


def trouble(pid: object) -> str:
    """``stopped`` (by SIGSTOP or a debugger), ``gone`` or nothing, of a process of this machine."""
    state = (_stat(pid) or ["X"])[0]
    return "stopped" if state in "Tt" else "gone" if state in "ZX" else ""


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


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
