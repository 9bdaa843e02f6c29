"""Wrapper of one compiler command of ninja: ``python -I -S .../worker/__main__.py FILE -- COMMAND...``.

FILE is the command's output. The worker waits for a compile slot, and kills the compiler and itself as soon
as the builder, the process that started ninja, has ended. Next to FILE it writes a record: times, memory, and
digests of FILE and of its inputs. If both digests are still right, FILE is not compiled again. So an interrupted
build resumes without ninja's log and with any file times, and a changed object is compiled again. The worker
prints one line for the builder before the compiler's output and one after it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

if not __package__:  # started by its path: import the files next to it as a package
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    __package__ = "worker"

from . import RUN, UNIT, file_digest, hold_shared, inputs_digest, is_up_to_date
from .slots import POLL, take_slot


def main() -> int:
    file, command = sys.argv[1], sys.argv[3:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # the kills below must reach only this process and its compiler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run_file = open(os.path.join(os.path.dirname(file), RUN))  # noqa: SIM115 (open, with a shared lock, until this process ends)
        hold_shared(run_file.fileno())
        run = json.load(run_file)
    except (OSError, ValueError) as err:
        print(f"fatal error: the build directory was changed while it was in use: {err}", file=sys.stderr)
        return 1
    os.set_inheritable(run["alive"], False)  # a compiler may start a daemon that outlives the build
    builder = select.poll()
    builder.register(run["alive"], select.POLLIN)

    def end_without_builder() -> None:
        if builder.poll(0):  # only the builder has the other end of this pipe, so it is gone
            os.killpg(0, signal.SIGKILL)

    if is_up_to_date(file):  # it has a valid record
        tell(file=file, code=0)
        return 0
    queued = time.time()
    slot = take_slot(run["slots"], run["limit"], run["expected"].get(os.path.basename(file), 0), end_without_builder)
    started = time.time()
    tell(file=file, command=command)
    code, peak = compile_(command, builder)
    record: dict[str, float | str] = dict(queued=queued, start=started, end=time.time(), slot=slot, peak=peak)
    with suppress(OSError):
        if code == 0 and os.path.exists(file):
            record["object"] = file_digest(file)
            if os.path.exists(f"{file}.d"):
                record["inputs"] = inputs_digest(file)
        with open(f"{file}.new", "w") as note:
            json.dump(record, note)
        os.replace(f"{file}.new", f"{file}.json")
    tell(file=file, code=code)
    if code < 0:
        os.killpg(0, signal.SIGKILL)  # processes that the compiler started must not outlive it
    return code


def compile_(command: list[str], builder: select.poll) -> tuple[int, int]:
    """Run a compiler. Return its exit code and peak memory in bytes. Print why it did not run to its end."""
    try:
        status, peak = wait(os.posix_spawnp(command[0], command, os.environ), builder)
    except OSError as err:
        print(f"fatal error: {command[0]}: {err.strerror}")
        return 127, 0
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"\nfatal error: {command[0]} was killed by signal {-code}")
    return code, peak


def wait(child: int, builder: select.poll) -> tuple[int, int]:
    """Return the exit status, and the peak memory in bytes of the compiler or its largest child."""
    timeout: int | None = None
    try:
        builder.register(os.pidfd_open(child), select.POLLIN)
    except (AttributeError, OSError):
        timeout = int(POLL * 1000)  # old kernels have no pidfd: poll
    while True:
        events = builder.poll(timeout)
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss * 1024
        if events:  # the compiler has not ended, so the builder has
            os.killpg(0, signal.SIGKILL)


def tell(**what: object) -> None:
    print(f"\n{UNIT}{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
