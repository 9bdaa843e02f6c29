"""Waits and builds report their progress, and no wait is longer than necessary."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from contextlib import suppress

import pytest

from flashinfer.errors import BuildError, JitTimeoutError
from flashinfer.jit import lock, subscribe
from flashinfer.jit.build import make_request
from flashinfer.jit.history import estimate
from flashinfer.jit.lock import Hold, try_hold, wait
from flashinfer.jit.resolve import look_up, resolve

from ..support.processes import Compiler, answering, end, in_a_thread, owners, start, until

HOLD = """
    import os, sys, time
    from flashinfer.jit.lock import try_hold
    hold = try_hold(sys.argv[1], "slow")
    hold.update_note(done=3, total=7)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""
BUILD = """
    import sys
    from flashinfer.jit import gen_jit_spec
    from flashinfer.jit import lock
    lock.PATIENCE = 1.0
    print("built", gen_jit_spec(sys.argv[1], [sys.argv[2]]).build().path)
"""


@pytest.fixture
def events():
    seen: list = []
    stop = subscribe(seen.append)
    yield seen
    stop()


@pytest.fixture
def holder():
    """Return a function that starts a process which holds the lock ``name``. The test ends it."""
    processes = []

    def hold(name: str, seconds: float, program: str = HOLD):
        process = start(program, name, seconds)
        assert process.stdout.readline() == "held\n"
        processes.append(process)
        return process

    yield hold
    for process in processes:
        with suppress(ProcessLookupError):  # kills its children too
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def never() -> bool:
    return False


def test_a_wait_reports_itself(holder, events, monkeypatch):
    monkeypatch.setattr(lock, "FIRST_REPORT", 0.2)
    monkeypatch.setattr(lock, "NEXT_REPORTS", 0.3)
    owner = holder("a build", 600)
    lines: list[str] = []

    def heard(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            owner.kill()

    monkeypatch.setattr(lock, "say", heard)
    hold = wait("a build", "slow", never)
    assert hold is not None
    hold.release()
    assert len(lines) >= 2
    for line in lines:
        assert re.match(
            rf"waiting for slow, which pid {owner.pid} on \S+ is building.*: \d+ s, 3 of 7 steps done", line
        )
    assert {event.kind for event in events} == {"wait"} and len(events) == len(lines) + 1
    assert events[0].detail["done"] == 3 and events[0].detail["total"] == 7
    assert f"pid {owner.pid} on " in events[0].detail["owner"]
    assert 0.5 < sum(event.ms for event in events) / 1e3 < 300, "each event counts the time since the last one"


def test_reports_come_within_ten_seconds_and_then_every_thirty():
    assert lock.FIRST_REPORT <= 10 and lock.NEXT_REPORTS <= 30


def test_a_released_lock_is_taken_at_once(holder):
    owner = holder("a build", 600)
    began = time.monotonic()
    owner.kill()
    assert wait("a build", "slow", never) is not None and time.monotonic() - began < 300


def test_a_wait_has_a_deadline(holder, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_TIMEOUT", "0.5")
    owner = holder("a build", 600)
    began = time.monotonic()
    with pytest.raises(JitTimeoutError, match=rf"module 'slow' .*pid {owner.pid} on .*FLASHINFER_JIT_TIMEOUT=0.5"):
        wait("a build", "slow", never)
    assert 0.5 <= time.monotonic() - began < 300


def test_the_deadline_of_a_build(make_spec, holder, workspace, monkeypatch):
    """One module is built by another process that takes too long. The other module is built here."""
    monkeypatch.setenv("FLASHINFER_JIT_TIMEOUT", "0.5")
    taken, free = make_spec("taken"), make_spec("free")
    workspace.mkdir()
    holder(f"{make_request(taken).build_key} {workspace.resolve()}", 600)
    outcomes = resolve([make_request(taken), make_request(free)])
    assert [outcome.how for outcome in outcomes] == ["failed", "built"]
    assert isinstance(outcomes[0].error, JitTimeoutError) and isinstance(outcomes[0].error, BuildError)
    with pytest.raises(JitTimeoutError):
        taken.build()


@pytest.fixture
def slow_build(make_spec, tmp_path, monkeypatch):
    """Start a builder whose compiler takes long. A flag makes later ones fast."""
    quick, launcher = tmp_path / "quick", tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho >> {tmp_path}/count\ntest -e {quick} || sleep 600\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    spec = make_spec("slow", answering(5))
    builder = start(BUILD, spec.name, spec.source_paths()[0])
    until(lambda: [note for note in owners(tmp_path / "runtime") if note["pid"] == builder.pid])
    until(lambda: (tmp_path / "count").exists())
    quick.touch()
    yield spec, builder
    os.killpg(builder.pid, signal.SIGCONT)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()


def answer(spec) -> int:
    return int(ctypes.CDLL(str(look_up(spec).artifact.path)).answer())


def test_a_stopped_builder(slow_build, events, monkeypatch, capsys, tmp_path):
    """Waiting processes report it, and after a while one of them builds for all."""
    spec, builder = slow_build
    monkeypatch.setattr(lock, "FIRST_REPORT", 0.2)
    monkeypatch.setattr(lock, "PATIENCE", 1.0)
    os.kill(builder.pid, signal.SIGSTOP)
    others = [start(BUILD, spec.name, spec.source_paths()[0]) for _ in range(3)]
    began = time.monotonic()
    assert spec.build().path.exists() and 1 <= time.monotonic() - began < 3000
    said = capsys.readouterr().err
    assert re.search(rf"waiting for slow, which pid {builder.pid} on \S+ is building and is stopped: \d+ s", said)
    assert f"slow: pid {builder.pid} on " in said and "is stopped since 1 s; building it here" in said
    assert any(event.kind == "wait" and event.detail.get("trouble") == "stopped" for event in events)
    assert all("built " in end(other) for other in others) and answer(spec) == 5
    assert (tmp_path / "count").read_text() == "\n" * 2, "one of four waiting processes compiles"


def test_a_published_artifact_ends_a_wait(make_spec, holder, workspace, capsys):
    """The lock's owner was stopped after it published, or is on another host: the artifact exists."""
    spec = make_spec("there", answering(1))
    workspace.mkdir()
    request = make_request(spec)
    elsewhere = dict(FLASHINFER_RUNTIME_DIR=str(workspace.parent / "another host"))
    other = start(BUILD, spec.name, spec.source_paths()[0], **elsewhere)
    holder(f"{request.build_key} {workspace.resolve()}", 600)
    began = time.monotonic()
    assert resolve([request])[0].how == "reused" and time.monotonic() - began < 3000
    assert "built " in end(other)


def test_two_hosts_build_in_directories_of_their_own(make_spec, tmp_path, compilers_started):
    """The hosts share the workspace but no locks.

    Each compiles at most once, and both publish the same bytes.
    """
    spec = make_spec("shared", answering(9))
    hosts = [start(BUILD, spec.name, spec.source_paths()[0], FLASHINFER_RUNTIME_DIR=str(tmp_path / f"host{number % 2}"))
             for number in range(4)]  # fmt: skip
    said = [end(host) for host in hosts]
    paths = {line for text in said for line in text.splitlines() if line.startswith("built ")}
    places = {match for text in said for match in re.findall(r"in (\S+/build/\S+)", text)}
    assert len(paths) == 1 and answer(spec) == 9
    assert compilers_started() == len(places) <= 2


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    hold = try_hold("forked", "slow")
    assert isinstance(hold, Hold) and in_a_thread(lambda: try_hold("forked", "slow")) is None
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        hold.abandon()  # a kill of this process has the same effect
        again = until(lambda: try_hold("forked", "slow"))
        assert again.token == hold.token, "the next holder resumes in the same directory"
        again.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_that_came_with_an_image_names_no_directory(tmp_path):
    """Containers of one image find the same note, and may share a workspace but no locks."""
    hold = try_hold("x", "tiny")
    hold.abandon()
    path = next(tmp_path.glob("runtime/*/*.note"))
    note = json.loads(path.read_text())
    assert note["token"] == hold.token and note["namespace"]
    path.write_text(json.dumps({**note, "namespace": "elsewhere"}))
    assert try_hold("x", "tiny").token != hold.token


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 3}', '{"token": "../../x"}', "\0"])
def test_an_unreadable_lock(text, tmp_path, capsys, monkeypatch):
    """A waiting process cannot name the owner. The next holder uses another directory."""
    monkeypatch.setattr(lock, "FIRST_REPORT", 0.1)
    hold = try_hold("x", "tiny")
    (path,) = tmp_path.glob("runtime/*/*.note")
    path.write_text(text)
    monkeypatch.setenv("FLASHINFER_JIT_TIMEOUT", "0.3")
    with pytest.raises(JitTimeoutError, match=r"which another process is building: \d+ s"):
        in_a_thread(lambda: wait("x", "tiny", never))
    hold.abandon()
    again = try_hold("x", "tiny")
    assert again.token.isalnum() and again.token != hold.token


LEAK = """
    import os, subprocess, sys
    from flashinfer.jit.lock import try_hold
    hold = try_hold(sys.argv[1], "slow")
    path = os.path.realpath(hold.lock.lock_file)
    (descriptor,) = (int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == path)
    subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[descriptor], stdout=subprocess.DEVNULL)
    print("held", flush=True)
    os._exit(1)  # not even its own end gives the lock back
"""


def test_a_lock_that_outlives_its_owner(holder, monkeypatch, capsys):
    """A child of the owner still holds the lock for an unknown time."""
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    owner = holder("leaked", 600, LEAK)
    owner.wait()
    hold = wait("leaked", "slow", never)
    assert hold is not None and "is gone since" in capsys.readouterr().err
    hold.release()


def test_a_build_reports_its_progress(make_spec, tmp_path, monkeypatch):
    """Modules, files and the expected time are reported before any compiler runs, and then the progress."""
    said: list[str] = []
    monkeypatch.setattr("flashinfer.jit.history.say", lambda text: (said.append(text), before.append(compiler.started)))
    monkeypatch.setattr("flashinfer.jit.history.REPORT_INTERVAL", 0.5)
    compiler, before = Compiler(tmp_path, 1.2), list[int]()
    monkeypatch.setenv("CXX", str(compiler.path))
    make_spec("spoken", {"a.cc": "int a;\n", "b.cc": "int b;\n"}).build()
    assert re.fullmatch(r"building spoken \(2 source files\) in \S+/build/\S+/spoken", said[0]) and before[0] == 0
    assert all(re.fullmatch(r"[0-3]/3 steps, \d+ s: (spoken|done)", text) for text in said[1:]) and len(said) > 2
    said.clear()
    again = make_spec("spoken", {"a.cc": "int a = 1;\n", "b.cc": "int b;\n"})
    assert 2 < estimate(again) < 60
    again.build()
    assert re.match(r"building spoken \(2 source files, about \d+ s\) in ", said[0])
    assert all(re.fullmatch(r"[0-3]/3 steps, \d+ of about \d+ s: (spoken|done)", text) for text in said[1:])


def test_progress_on_a_terminal(make_spec, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    make_spec("seen").build()
    _, *shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown[0].startswith("flashinfer: ") and "steps" in shown[0] and shown[-1] == "", "the last line is cleared"


@pytest.mark.parametrize("text", ["", "[]", '{"a.cc": 3}', '{"a.cc": ["x", 1]}', "\0"])
def test_unreadable_history_is_no_history(text, make_spec, workspace):
    spec = make_spec("past")
    (workspace / "history").mkdir(parents=True)
    (workspace / "history" / "past.json").write_text(text)
    assert estimate(spec) is None
    spec.build()
    assert estimate(spec) > 0


def test_a_build_leaves_a_timeline(make_spec, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(Compiler(tmp_path, 0.3).path))
    monkeypatch.setenv("MAX_JOBS", "1")
    (outcome,) = resolve([make_request(make_spec("timed", {"a.cc": "int a;\n", "b.cc": "int b;\n"}))])
    assert outcome.timeline.jobs == 1 and outcome.timeline.pid == os.getpid()
    units = {(unit.kind, unit.name): unit for unit in outcome.timeline.units}
    assert {("compile", "a.o"), ("compile", "b.o"), ("link", "timed.so")} <= units.keys()
    first, second, link = sorted((unit for unit in units.values() if unit.kind != "wait"), key=lambda unit: unit.end)
    assert outcome.timeline.began < first.start and first.start + 0.3 < first.end <= second.start < second.end
    assert second.end <= link.start < link.end < time.time()
    assert all(10 << 20 < unit.peak_rss_bytes < 4 << 30 for unit in (first, second, link))


def test_a_wait_is_in_the_timeline(slow_build, monkeypatch):
    spec, builder = slow_build
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    os.kill(builder.pid, signal.SIGSTOP)
    (outcome,) = resolve([make_request(spec)])
    kinds = [unit.kind for unit in outcome.timeline.units]
    # On a loaded machine, the module's own compilers may wait for memory too.
    assert kinds[0] == "wait" and [kind for kind in kinds if kind != "wait"] == ["compile", "link"]
    waited = outcome.timeline.units[0]
    assert waited.module == "slow" and 0.5 < waited.end - waited.start < 300
