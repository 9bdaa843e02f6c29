"""Child processes of a test, and a compiler that logs its runs."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashinfer.jit.worker import process_problem

ROOT = Path(__file__).resolve().parents[2]


def python_path(*first: object) -> str:
    """Return a child's ``PYTHONPATH``: ``first``, then ours without this checkout."""
    ours = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept = (path for path in ours if not Path(path).resolve().is_relative_to(ROOT))
    return os.pathsep.join([*map(str, first), *kept])


def start(program: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start a program in a process group of its own, with output and errors in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **variables},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], seconds: float = 180) -> str:
    """Return a process's output until it ends. Kill one that hangs, and raise an error."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"hangs: {process.communicate()[0]}") from None


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Return a function's result from another thread, and raise its exception here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def until(condition: Callable[[], Any], seconds: float = 120, what: str = "") -> Any:
    """Wait until another process has done something."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.01)
    return value


def stopped(pid: int) -> bool:
    return process_problem(pid) == "stopped"


def owners(runtime: Path) -> list[dict[str, Any]]:
    """Return the notes of the last holders of build locks."""
    notes = []
    for path in sorted(runtime.glob("flashinfer-*/*.note")):
        try:
            notes.append(json.loads(path.read_text()))
        except ValueError:
            continue  # the note is being written
    return notes


def answering(value: int) -> dict[str, str]:
    """Return the files of a module whose ``answer()`` can be called without torch."""
    return {"unit.cc": f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {value}; }}\n'}


def answer(artifact: Any) -> int:
    """Return the answer of a built module."""
    return int(ctypes.CDLL(str(artifact.path)).answer())


def files_in(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob("*") if path.is_file())


class Compiler:
    """A slower C++ compiler that logs the start and the end of each run. While it is held, no run ends."""

    def __init__(self, folder: Path, seconds: float = 0) -> None:
        self.log, self.path, self._held = folder / "runs", folder / "slow-g++", folder / "held"
        self.path.write_text(
            f"#!/bin/sh\ncase $1 in --version) exec g++ --version;; esac\necho + >> {self.log}\n"
            f"sleep {seconds}\nwhile test -e {self._held}; do sleep 0.05; done\n"
            f'{shutil.which("g++")} "$@"\nstatus=$?\necho - >> {self.log}\nexit $status\n'
        )
        self.path.chmod(0o755)

    def hold(self) -> None:
        self._held.touch()

    def release(self) -> None:
        self._held.unlink()

    def runs(self) -> Iterator[int]:
        """Yield the number of running compilers after each start and each end."""
        alive = 0
        for line in self.log.read_text().split() if self.log.exists() else []:
            alive += 1 if line == "+" else -1
            yield alive

    @property
    def started(self) -> int:
        return self.log.read_text().count("+") if self.log.exists() else 0
