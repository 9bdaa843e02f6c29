"""``trace``: run a program and record every module that it, or a process it starts, requests."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..jit.machine.workspace import scratch
from ..jit.report import write
from ..jit.specfile import write_specs
from .table import show
from .usage import Add, UsageError, json_option

HELP = "Run a program and record every module that it, or a process it starts, requests."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the specs, one line of JSON each")
    add("program", nargs="+", metavar="-- PROGRAM", help="the program and its arguments")


def run(options: argparse.Namespace) -> int:
    """Return the program's exit code, or as a shell 128 plus the number of the signal that ended it.

    The file is written however the program ends.
    """
    output: Path = options.output.absolute()
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output: {output.parent} is not a writable directory")
    if shutil.which(options.program[0]) is None:
        raise UsageError(f"program: {options.program[0]!r} is not an executable program")
    with scratch(prefix="flashinfer-trace-") as folder:
        code = _run(options.program, {**os.environ, "FLASHINFER_JIT_TRACE": str(folder)})
        lines = list(_recorded(folder))
        count = write_specs(output, lines)
    rows = sorted({(line["spec"]["name"], line["spec"]["backend"], " ".join(line["archs"])) for line in lines})
    if options.json:
        show([dict(zip(("name", "backend", "archs"), row, strict=True)) for row in rows], True)
    write(f"{output}: {count} modules\n")
    return code


def _run(program: list[str], environment: dict[str, str]) -> int:
    """Run a program to its end. Pass termination signals on to it."""
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        started[0].send_signal(number) if started else early.append(number)

    def leave_to_program(number: int, frame: FrameType | None) -> None:
        """Do nothing: the terminal also interrupts the program, unless the signal is ignored here."""

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, leave_to_program),
    }
    try:
        with subprocess.Popen(program, env=environment) as process:
            started.append(process)
            for number in early:
                process.send_signal(number)
            code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded specs. A killed process may leave a private file, whose name begins with a dot."""
    for path in sorted(folder.glob("[!.]*.json")):
        yield json.loads(path.read_bytes())
