"""Runs one compiler for ninja: ``python -I -S unit.py FILE -- COMMAND...`` in the build directory, FILE is what it makes.

It waits for a compile slot, takes the compiler down with itself as soon as the builder is gone, and leaves a record
beside FILE: when it ran, its memory, and digests of FILE and of what it was made from. An object whose record still
holds is not made again: so an interrupted build resumes, whatever happened to times, ninja's log or the object.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # a name that mypy knows: importing typing takes longer than all that it would be used for
if TYPE_CHECKING:
    from typing import Any

if __package__:
    from .budget import POLL, read_note, take_slot
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from budget import POLL, read_note, take_slot  # type: ignore[import-not-found,no-redef]

RUN = "run.json"  # what the builder says to the units of one module, beside their files


def main() -> int:
    file, command = sys.argv[1], sys.argv[3:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # what is killed below is this process and its compiler, nobody else
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with open(os.path.join(os.path.dirname(file), RUN)) as text:
            run: dict[str, Any] = json.load(text)
    except (OSError, ValueError) as err:
        print(f"fatal error: the build directory was changed while it was in use: {err}", file=sys.stderr)
        return 1
    builder = select.poll()
    builder.register(run["alive"], select.POLLIN)

    def check() -> None:
        if builder.poll(0):  # the builder alone has the other end of this pipe: it is gone
            os.killpg(0, signal.SIGKILL)

    check()
    _keep_locks()
    if is_made(file):
        return 0
    queued = time.time()
    slot = take_slot(run["slots"], run["limit"], run["expected"].get(os.path.basename(file), 0), check)
    started = time.time()
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as err:
        print(f"fatal error: {command[0]}: {err.strerror}", file=sys.stderr)
        return 127
    status, peak = _wait(child, builder)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"fatal error: {command[0]} was killed by signal {-code}", file=sys.stderr)
    record: dict[str, Any] = {"queued": queued, "start": started, "end": time.time(), "slot": slot.number, "peak": peak}
    with suppress(OSError):
        if code == 0 and os.path.exists(file):
            record["object"] = _digest(file)
            if os.path.exists(f"{file}.d"):
                record["inputs"] = _inputs(file)
        with open(f"{file}.new", "w") as text:
            json.dump(record, text)
        os.replace(f"{file}.new", f"{file}.json")
    if code < 0:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)  # what the compiler has started must not outlive it
    return code


def _keep_locks() -> None:
    """A compiler must not inherit the locks that this process has: it may start a daemon that outlives the build."""
    with suppress(OSError):
        for number in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):
                os.set_inheritable(number, number <= 2)


def _wait(child: int, builder: select.poll) -> tuple[int, int]:
    """Status and peak memory in bytes of the compiler, or of the largest process that it started."""
    patience: int | None = None
    try:
        builder.register(os.pidfd_open(child), select.POLLIN)
    except (AttributeError, OSError):
        patience = int(POLL * 1000)  # an old kernel: look now and then
    while True:
        ended = builder.poll(patience)
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss * 1024
        if ended:
            os.killpg(0, signal.SIGKILL)


def is_made(file: str, folder: str = "") -> bool:
    """Whether ``file`` is what its compiler made, and what it was made from is unchanged. ``folder``: where ninja ran."""
    path = os.path.join(folder, file)
    record = read_record(path)
    try:
        return bool(record["object"] == _digest(path) and record["inputs"] == _inputs(path, folder))
    except (OSError, KeyError):
        return False


def read_record(file: str) -> dict[str, Any]:
    """What the last run left beside ``file``; empty where there is none, or not a whole one."""
    with suppress(OSError), open(f"{file}.json") as text:
        return read_note(text.fileno())
    return {}


def _inputs(file: str, folder: str = "") -> str:
    """One digest of all that an object was made from: a record stays short, whatever a compiler reads."""
    import hashlib

    with open(f"{file}.d") as text:
        names = [os.path.join(folder, name) for name in read_depfile(text.read())]
    # nvcc lists the names in #line directives too, which need not be files.
    digests = " ".join(_digest(name) if os.path.isfile(name) else "none" for name in names)
    return hashlib.sha256(digests.encode()).hexdigest()


def _digest(file: str) -> str:
    import hashlib

    with open(file, "rb") as data:
        return hashlib.sha256(data.read()).hexdigest()


def read_depfile(text: str) -> list[str]:
    """The prerequisites in a depfile of gcc or nvcc, unescaped."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|[^\s\\])+", names)]


if __name__ == "__main__":
    sys.exit(main())
