"""Builders that are killed at any moment: whoever waits goes on, nothing half-written is used, nothing runs on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..support.drawn import IN_CI
from ..support.processes import Compiler, answering, end, owners, start, stopped, until

# Forks children after the import; each builds the module, and says when it had it and what it answers.
HERD = """
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
    """Who builds a module now, if it is none of the killed."""
    pids = {note["pid"] for note in owners(runtime) if note["module"] == name} - not_in
    return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), None)


def test_kills_with_eight_waiters(make_spec, compiler, tmp_path):
    """Five builders of a module are killed one after the other at random moments, thirteen processes wanted it."""
    one_compile = 0.0  # of three the slowest: kills come at any moment of it
    for number in range(3):
        began = time.monotonic()
        make_spec(f"alone{number}").build()
        one_compile = max(one_compile, time.monotonic() - began)
    kills, rounds = 0, 0
    while kills < KILLS:
        rounds += 1
        name, value = f"killed{rounds}", random.randrange(10**6)
        source = make_spec(name, answering(value)).source_paths()[0]
        herd = start(HERD, WAITERS + 5, name, source)
        dead: set[int] = set()
        started = compiler.started
        while len(dead) < 5:
            pid = until(lambda n=name, d=frozenset(dead), h=herd: owner_of(n, tmp_path / "runtime", d) or h.poll() is not None)  # fmt: skip
            if pid is True:
                break
            time.sleep(random.uniform(0, 0.8 * one_compile))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                break  # it was faster: this module is built
            started = compiler.started
            dead.add(pid)
        lines = [json.loads(line) for line in end(herd).splitlines() if line.startswith("{")]
        survivors = [line for line in lines if line["pid"] not in dead]
        assert len(survivors) >= WAITERS, "nobody hangs, nobody fails"
        assert {line["answer"] for line in lines} == {value}, "nobody loads anything else"
        # One of those who wait takes over: a compile and a link, and what the last of the dead was about to start.
        assert compiler.started - started <= 3, "nobody waits for more than one build after the last kill"
        kills += len(dead)
    print(f"{kills} kills in {rounds} rounds, one compile {one_compile:.2f} s")
    assert compiler.started <= 2 * (3 + rounds + kills), "a kill costs one compile and one link at most"


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
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def endless(make_spec, tmp_path, monkeypatch):
    """A build whose compiler takes ten minutes, just begun; a flag makes the next one quick."""
    quick = tmp_path / "quick"
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\ntest -e {quick} || sleep 600\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    spec = make_spec("endless", answering(3))
    # A shell that starts tests in the background leaves SIGINT ignored, and children inherit that.
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
    assert len(family) >= 3, "ninja, the program in front of the compiler, the compiler"
    os.kill(builder.pid, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: not any(program_of(pid) for pid in family), what="all of them end")
    spec.build()
    assert time.monotonic() - began < 300, "nothing that is left of it is waited for"


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
def test_what_is_left_of_a_build_is_not_disturbed(left, endless, capsys):
    """What is stopped outlives its builder. A compiler's might go on to write, so the next one builds elsewhere; ninja's
    would end at its first word, so what it has made is used."""
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
    """As the kernel does when the memory is full."""
    spec, builder = endless
    family = descendants(builder.pid)
    os.kill(next(pid for pid in family if program_of(pid).split()[1].endswith("/launcher")), signal.SIGKILL)
    assert "/launcher was killed by signal 9" in end(builder).splitlines()[-1]
    until(lambda: not any(program_of(pid) for pid in family), what="what the compiler started ends too")
    spec.build()
