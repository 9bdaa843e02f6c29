"""A Dask scheduler with workers on this machine, each with its own directories and compiler."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from .processes import ROOT, python_path, until

# Replaces a compiler: writes an empty object whose depfile names its source. Links are real, of empty
# objects.
FAKE = """
for word; do last=$word; case $before in -c) source=$word;; -MF) deps=$word;; esac; before=$word; done
case "$*" in
*" -c "*) echo "$last: $source" > "$deps"; exec gcc -c -x c /dev/null -o "$last";;
esac
for word; do shift; case $word in -l*) ;; *) set -- "$@" "$word";; esac; done
exec gcc -nostdlib "$@"
"""


# Runs a program of Dask in an environment without this package.
WITHOUT_PACKAGE = "import sys; sys.modules['flashinfer'] = None; from distributed.cli.dask_{} import main; main()"


def free_port() -> int:
    """Return a port below the ephemeral range, so that the kernel gives it to no other process meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}


class Cluster:
    """A scheduler, and the workers that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), list[subprocess.Popen[bytes]]()
        self.address = f"tcp://127.0.0.1:{self.port}"
        # A scheduler does not need this package.
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--no-show"]
        self.scheduler = self._start("scheduler", options, has_package=False)
        self.log = folder / "compilers"
        self.count = 0

    def _start(
        self, what: str, arguments: list[str], has_package: bool = True, **variables: str
    ) -> subprocess.Popen[bytes]:
        program = ["-m", f"distributed.cli.dask_{what}"] if has_package else ["-c", WITHOUT_PACKAGE.format(what)]
        command = [sys.executable, *program, "--no-dashboard", *arguments]
        with (self.folder / f"{what}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(**variables), cwd=self.folder, start_new_session=True
            )
        self.processes.append(process)
        return process

    def worker(
        self,
        version: str = "",
        seconds: float = 0,
        compiles: str = 'exec g++ "$@"',
        has_package: bool = True,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Start a worker whose compiler has another ``version``, is slower by ``seconds``, or is a fake."""
        self.count += 1
        place = self.folder / f"worker{self.count}"
        place.mkdir()
        compiler = place / "g++"
        says = f"echo 'g++ {version}'; exit" if version else "exec g++ --version"
        compiler.write_text(
            f"#!/bin/sh\ncase $1 in --version) {says};; esac\n"
            f'case "$*" in *" -c "*) echo "{self.count} $*" >> {self.log};; esac\nsleep {seconds}\n{compiles}\n'
        )
        compiler.chmod(0o755)
        own = {"CXX": str(compiler), "FLASHINFER_WORKSPACE_DIR": str(place / "workspace"), "MAX_JOBS": "1"}
        own |= {"FLASHINFER_RUNTIME_DIR": str(place / "runtime")}
        options = ["--no-nanny", "--nthreads", "1", "--local-directory", str(place / "dask")]
        return self._start("worker", [self.address, *options], has_package, **own | variables)

    def joined(self, count: int) -> None:
        """Wait until the scheduler knows ``count`` workers."""
        log = self.folder / "scheduler.log"
        until(lambda: log.read_text().count("Register worker addr") >= count, what=f"{count} workers join")

    def compiled(self) -> list[str]:
        """Return the module of every compile that was started."""
        text = self.log.read_text() if self.log.exists() else ""
        return re.findall(r"-DFLASHINFER_MODULE=(\S+)", text)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
