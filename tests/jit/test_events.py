"""Events: for a callback, for a file of many processes, and as sums, without harm to the program."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time

import pytest

from flashinfer.errors import EnvironmentValueError
from flashinfer.jit import events, stats, subscribe

from ..support.processes import python_path
from .conftest import ROOT


@pytest.fixture
def fresh(monkeypatch):
    """Reset the sums and the reported files."""
    monkeypatch.setattr(events, "_sums", {})
    monkeypatch.setattr(events, "_unwritable", set())


@pytest.fixture
def heard():
    seen: list[events.Event] = []
    end = subscribe(seen.append)
    yield seen
    end()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fields_of_an_event(fresh, heard):
    before = time.time()
    events.emit("miss", "m", 1.23456, reason="none")
    (event,) = heard
    assert (event.kind, event.module, event.ms, event.detail) == ("miss", "m", 1.235, {"reason": "none"})
    assert before <= event.time <= time.time() and event.pid == os.getpid() and event.host == socket.gethostname()


def test_a_build_and_a_load_from_miss_to_load_and_then_a_hit(make_spec, python, tmp_path):
    spec = make_spec()
    program = """
        import json, sys
        from flashinfer import jit
        seen = []
        jit.subscribe(lambda event: seen.append([event.kind, event.module, event.ms]))
        jit.gen_jit_spec("tiny", [sys.argv[1]]).build_and_load()
        print(json.dumps([seen, jit.stats()]))
    """
    for wanted in (["miss", "compile", "load"], ["hit", "load"]):
        seen, sums = json.loads(python(program, spec.sources[0]).stdout)
        assert [kind for kind, _, _ in seen] == wanted and {module for _, module, _ in seen} == {"tiny"}
        assert all(ms > 0 for _, _, ms in seen)
        assert sums["kinds"] == {kind: {"count": 1, "ms": ms} for kind, _, ms in seen}
        assert sums["modules"] == {"tiny": sums["kinds"]}


def test_sums_are_per_kind_and_per_module(fresh):
    assert stats() == {"kinds": {}, "modules": {}}
    for kind, module, ms in (("hit", "a", 1.5), ("hit", "a", 2.25), ("hit", "b", 4), ("load", "b", 8)):
        events.emit(kind, module, ms)
    assert stats() == {
        "kinds": {"hit": {"count": 3, "ms": 7.75}, "load": {"count": 1, "ms": 8.0}},
        "modules": {
            "a": {"hit": {"count": 2, "ms": 3.75}},
            "b": {"hit": {"count": 1, "ms": 4.0}, "load": {"count": 1, "ms": 8.0}},
        },
    }


def test_a_forked_child_counts_for_itself_even_where_the_parent_was_counting(python):
    done = python("""
        import os, sys
        from flashinfer.jit import events, stats
        events.emit("hit", "parent", 1)
        events.guard.acquire()  # as another thread may at any moment
        child = os.fork()
        if child == 0:
            events.emit("hit", "child", 2)
            os._exit(list(stats()["modules"]) != ["child"])
        events.guard.release()
        assert os.waitpid(child, 0)[1] == 0
        assert list(stats()["modules"]) == ["parent"]
    """)
    assert done.returncode == 0


def test_subscriptions_end_and_may_fail(fresh, heard, caplog):
    def fail(event):
        raise RuntimeError("on purpose")

    end_failing, seen = subscribe(fail), []
    end = subscribe(seen.append)
    with caplog.at_level(logging.ERROR, logger="flashinfer"):
        events.emit("hit", "m")
    end(), end(), end_failing()
    events.emit("load", "m")
    assert [event.kind for event in heard] == ["hit", "load"] and [event.kind for event in seen] == ["hit"]
    assert "on purpose" in caplog.text


def test_many_processes_add_whole_lines_to_one_file(tmp_path, monkeypatch):
    file, count = tmp_path / "events.jsonl", 200
    program = f"""
from flashinfer.jit.events import emit
for number in range({count}):
    emit("hit", "m" * 300, number, path="p" * 3000)
"""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "FLASHINFER_JIT_EVENTS": str(file)}
    children = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    seen = lines(file)
    for child in children:
        mine = [line for line in seen if line["pid"] == child.pid]
        assert [line["ms"] for line in mine] == list(range(count))
    assert len(seen) == 4 * count
    assert all(len(line["path"]) == 3000 and line["host"] == socket.gethostname() for line in seen)
    assert set(seen[0]) == {"kind", "module", "ms", "time", "pid", "host", "path"}


@pytest.mark.parametrize("where", ["missing/events.jsonl", "folder", "pipe"])
def test_a_file_that_cannot_be_written_is_reported_once(where, fresh, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # without a reader
    monkeypatch.setenv("FLASHINFER_JIT_EVENTS", str(tmp_path / where))
    for _ in range(3):
        events.emit("hit", "m", 1)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(tmp_path / where) in said[0] and "cannot be written" in said[0]
    assert stats()["kinds"]["hit"]["count"] == 3


def test_a_full_disk_is_reported_once(fresh, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_JIT_EVENTS", "/dev/full")
    events.emit("hit", "m")
    events.emit("hit", "m")
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_relative_path_is_an_error_that_names_the_variable(fresh, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_EVENTS", "events.jsonl")
    with pytest.raises(EnvironmentValueError, match="FLASHINFER_JIT_EVENTS"):
        events.emit("hit", "m")


def test_the_logger_respects_its_level(fresh, caplog):
    with caplog.at_level(logging.INFO, logger="flashinfer"):
        events.emit("miss", "m", 2, reason="none")
    assert caplog.messages == ["miss m 2.0 ms reason=none"]
