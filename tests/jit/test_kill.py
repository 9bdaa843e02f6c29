"""Builders killed at any moment: waiters continue, nothing incomplete is used, no process remains."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..support.processes import Compiler, answering, end, owners, start, stopped, until
from ..support.slow import IN_CI

# Forks children after the import. Each builds the module, and reports the time and the module's answer.
BUILDERS = """
    import ctypes, json, os, sys
    from flashinfer.jit import gen_jit_spec
    count, name, source = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for _ in range(count):
        if os.fork() == 0:
            artifact = gen_jit_spec(name, [source]).build()
            answer = ctypes.CDLL(str(artifact.path)).answer()
            os.write(1, json.dumps({"pid": os.getpid(), "answer": answer}).encode() + b"\\n")
            os._exit(0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
"""
WAITERS = 8
KILLS = 50 if IN_CI else 10


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Compiler:
    compiler = Compiler(tmp_path, 0.25)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def owner_of(name: str, runtime: Path, not_in: set[int]) -> int | None:
    """Return the process that builds a module, or ``None`` if it is one of the killed."""
    pids = {note["pid"] for note in owners(runtime) if note["module"] == name} - not_in
    return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), None)


def test_kills_with_eight_waiters(make_spec, compiler, tmp_path):
    """Five of thirteen builders of a module are killed one after the other at random moments."""
    one_compile = 0.0  # the slowest of three: kills happen at any moment of it
    for number in range(3):
        began = time.monotonic()
        make_spec(f"alone{number}").build()
        one_compile = max(one_compile, time.monotonic() - began)
    kills, rounds = 0, 0
    while kills < KILLS:
        rounds += 1
        name, value = f"killed{rounds}", random.randrange(10**6)
        source = make_spec(name, answering(value)).source_paths()[0]
        builders = start(BUILDERS, WAITERS + 5, name, source)
        dead: set[int] = set()
        started = compiler.started
        while len(dead) < 5:
            pid = until(lambda n=name, d=frozenset(dead), h=builders: owner_of(n, tmp_path / "runtime", d) or h.poll() is not None)  # fmt: skip
            if pid is True:
                break
            time.sleep(random.uniform(0, 0.8 * one_compile))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                break  # the module was built before the kill
            started = compiler.started
            dead.add(pid)
        lines = [json.loads(line) for line in end(builders).splitlines() if line.startswith("{")]
        survivors = [line for line in lines if line["pid"] not in dead]
        assert len(survivors) >= WAITERS, "no process hangs or fails"
        assert {line["answer"] for line in lines} == {value}, "all load the same module"
        # A waiting process takes over with a compile and a link. The last killed one may have been about to
        # start one too.
        assert compiler.started - started <= 3, "one build follows the last kill"
        kills += len(dead)
    print(f"{kills} kills in {rounds} rounds, one compile {one_compile:.2f} s")
    assert compiler.started <= 2 * (3 + rounds + kills), "a kill costs at most one compile and one link"


BUILD = "import sys; from flashinfer.jit import gen_jit_spec; gen_jit_spec(sys.argv[1], [sys.argv[2]]).build()"


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for child, parent in (map(int, line.split()) for line in listed.splitlines()):
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def program_of(pid: int) -> str:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def endless(make_spec, tmp_path, monkeypatch):
    """Start a build whose compiler takes ten minutes. A flag makes the next one fast."""
    quick = tmp_path / "quick"
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\ntest -e {quick} || sleep 600\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    spec = make_spec("endless", answering(3))
    # A shell that starts tests in the background ignores SIGINT, and children inherit that.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {BUILD}"
    builder = start(program, spec.name, spec.source_paths()[0])
    until(lambda: any("sleep 600" in program_of(pid) for pid in descendants(builder.pid)), what="a compiler runs")
    quick.touch()
    yield spec, builder
    if builder.poll() is None:
        os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()


def test_compilers_end_with_their_builder(endless):
    spec, builder = endless
    family = descendants(builder.pid)
    assert len(family) >= 3, "ninja, the worker and the compiler"
    os.kill(builder.pid, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: not any(program_of(pid) for pid in family), what="all of them end")
    spec.build()
    assert time.monotonic() - began < 300, "no remaining process is waited for"


def test_an_interrupted_builder_takes_its_compilers_with_it(endless):
    spec, builder = endless
    family = descendants(builder.pid)
    os.kill(builder.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in end(builder)
    until(lambda: not any(program_of(pid) for pid in family), what="all of them end")
    spec.build()


def test_ninja_is_killed(endless):
    spec, builder = endless
    family = descendants(builder.pid)
    ninja = next(pid for pid in family if "ninja -C" in program_of(pid))
    os.kill(ninja, signal.SIGKILL)
    assert "building module 'endless' failed: ninja was killed by signal 9" in end(builder)
    until(lambda: not any(program_of(pid) for pid in family), what="the compiler ends too")
    spec.build()


@pytest.mark.parametrize("left", ["worker", "ninja -C"])
def test_survivors_of_a_build_are_not_disturbed(left, endless, capsys):
    """A stopped process outlives its builder.

    A stopped compiler might continue to write, so the next builder uses another directory. A stopped ninja
    would end at its first output, so its objects are used.
    """
    spec, builder = endless
    rest = next(pid for pid in descendants(builder.pid) if left in program_of(pid))
    os.kill(rest, signal.SIGSTOP)
    until(lambda: stopped(rest))
    os.kill(builder.pid, signal.SIGKILL)
    place = builder.stdout.readline().split(" in ")[1].strip()
    builder.wait()
    assert Path(place).is_dir()
    spec.build()
    if left == "worker":
        assert Path(place).is_dir() and place not in capsys.readouterr().err
        os.killpg(rest, signal.SIGKILL)
    else:
        assert place in capsys.readouterr().err and not Path(place).exists()
        os.kill(rest, signal.SIGKILL)


def test_a_compiler_is_killed(endless):
    """The kernel does so when memory is full."""
    spec, builder = endless
    family = descendants(builder.pid)
    os.kill(next(pid for pid in family if program_of(pid).split()[1].endswith("/launcher")), signal.SIGKILL)
    assert "/launcher was killed by signal 9" in end(builder).splitlines()[-1]
    until(lambda: not any(program_of(pid) for pid in family), what="what the compiler started ends too")
    spec.build()
