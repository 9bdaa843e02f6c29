"""Notes, locks and process states, for builders and for the wrapper of each compiler command (``__main__``).

The wrapper is started as ``python -I -S``. It imports little, so that it starts fast.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress

# mypy knows the name. Importing typing would take a third of the time of all other imports.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUN = "run.json"  # the builder's message to the compilers of one module, next to their files
# Begins a line that a worker prints. The rest is JSON: file and command, later file and code.
UNIT = "flashinfer-unit "


def read_note(descriptor: int) -> dict[str, Any]:
    """Return the note of a lock's holder. It is empty if it cannot be read or is being written."""
    with suppress(OSError, ValueError):
        note = json.loads(os.pread(descriptor, 4096, 0))
        return note if isinstance(note, dict) else {}
    return {}


def read_note_at(path: str) -> dict[str, Any]:
    """Return the note at ``path``. It is empty if there is no complete one."""
    with suppress(OSError), open(path) as file:
        return read_note(file.fileno())
    return {}


def write_note(descriptor: int, note: dict[str, Any]) -> None:
    data = json.dumps(note).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def is_up_to_date(file: str, folder: str = "") -> bool:
    """Return whether ``file`` is its compiler's output and its inputs are unchanged.

    ``folder``: ninja's directory.
    """
    path = os.path.join(folder, file)
    record = read_note_at(f"{path}.json")
    with suppress(OSError):
        return file_digest(path) == record.get("object") and inputs_digest(path, folder) == record.get("inputs")
    return False


def inputs_digest(file: str, folder: str = "") -> str:
    """Return one digest of an object's inputs, so that a record is short however many files they are."""
    with open(f"{file}.d") as text:
        names = [os.path.join(folder, name) for name in read_depfile(text.read())]
    # nvcc also lists names of #line directives, which need not be files.
    digests = " ".join(file_digest(name) if os.path.isfile(name) else "none" for name in names)
    return hashlib.sha256(digests.encode()).hexdigest()


def file_digest(file: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as data:
        return hashlib.sha256(data.read()).hexdigest()


def read_depfile(text: str) -> list[str]:
    """Return the prerequisites in a depfile of gcc or nvcc, unescaped."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|[^\s\\])+", names)]


def try_lock(descriptor: int) -> bool:
    """Lock an open file if it is free, and return whether this process holds the lock.

    Raises:
        OSError: this file system has no locks, which does not mean that another process holds it.
    """
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open or create a lock file. Other processes of this user can open it too, whatever the umask."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def hold_shared(descriptor: int) -> None:
    """Hold a shared lock on a file until it is closed. See :func:`is_held`."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_held(path: str | os.PathLike[str]) -> bool:
    """Return whether a process holds a lock on a file. The answer is yes on a file system without locks."""
    with suppress(OSError), open(path) as file:
        try:
            return not try_lock(file.fileno())
        except OSError:
            return True
    return False


PROC, CGROUPS = "/proc", "/sys/fs/cgroup"


def resident_memory(groups: set[int]) -> dict[int, int]:
    """Return the bytes in memory of each process group."""
    sums = dict.fromkeys(groups, 0)
    for name in filter(str.isdigit, os.listdir(PROC)):
        if (fields := _stat(name)) and (group := int(fields[2])) in groups:
            sums[group] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return sums


def _stat(pid: object) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on. They are empty if the process is gone."""
    return _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()


def process_problem(pid: object) -> str:
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
