"""Predictions of a load, made without side effects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.jit import freeze, history, load
from flashinfer.jit.machine import toolchain
from flashinfer.jit.probe import Probe
from flashinfer.jit.resolve import look_up

EFFECTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod",
           "os.utime", "os.truncate", "os.link", "os.symlink", "fcntl.flock", "fcntl.lockf"}  # fmt: skip

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Record of this process's effects on the outside, while ``on``."""

    def __init__(self) -> None:
        self.on, self.seen = False, []

    def __call__(self, event, arguments):
        if self.on and (event in EFFECTS or (event == "open" and (arguments[2] or 0) & WRITES)):
            self.seen.append((event, arguments[0]))


WATCH = Watch()
sys.addaudithook(WATCH)  # an audit hook cannot be removed


@pytest.fixture
def probe(tmp_path):
    """Return a function that probes a spec and checks that it started, locked, opened and wrote nothing."""

    def run(spec, needs=None) -> Probe:
        before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
        WATCH.seen, WATCH.on = [], True
        try:
            result = spec.probe(needs)
        finally:
            WATCH.on = False
        assert WATCH.seen == []
        assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return result

    return run


def test_the_watch_sees_effects(tmp_path):
    WATCH.seen, WATCH.on = [], True
    (tmp_path / "file").write_text("")
    subprocess.run(["true"])
    (tmp_path / "folder").mkdir()
    WATCH.on = False
    assert [event for event, _ in WATCH.seen] == ["open", "subprocess.Popen", "os.mkdir"]


def test_ready_says_where(make_spec, probe, tmp_path):
    spec = make_spec()
    artifact = spec.build()
    assert probe(spec) == Probe("ready", where=artifact.path)
    shutil.copytree(artifact.directory, tmp_path / "aot" / "tiny")
    assert probe(spec) == Probe("ready", where=tmp_path / "aot" / "tiny" / "tiny.so")


def test_loaded_modules_are_ready(make_spec, probe):
    spec = make_spec("probed_loaded")
    spec.build_and_load()
    artifact = load.LOADED[spec.name]
    shutil.rmtree(artifact.directory)
    assert probe(spec) == Probe("ready", where=artifact.path)


def test_impossible_with_another_loaded_build(make_spec, probe):
    make_spec("probed_changed").build_and_load()
    changed = make_spec("probed_changed", {"unit.cc": "int other;\n"})
    result = probe(changed)
    assert result.state == "impossible" and "is loaded from" in result.reason and "changed since" in result.reason


def test_buildable_in_an_empty_workspace(make_spec, probe, workspace):
    result = probe(make_spec())
    assert (result.state, result.where, result.estimate) == ("buildable", None, None)
    assert "no artifact of that name is in" in result.reason and not workspace.exists()


def test_the_estimate_is_this_machines_history(make_spec, probe):
    spec = make_spec()
    artifact = spec.build()
    shutil.rmtree(artifact.directory)
    assert probe(spec).estimate == history.estimate(spec) > 0


def test_impossible_without_a_compiler(make_spec, probe, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = probe(make_spec())
    assert result.state == "impossible" and "cannot find a C++ compiler" in result.reason


def test_impossible_without_nvcc(make_spec, probe, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    result = probe(make_spec("gpu", {"unit.cu": ""}))
    assert result.state == "impossible" and "nvcc" in result.reason


def test_impossible_without_an_arch(make_spec, probe, monkeypatch):
    monkeypatch.setattr("flashinfer.jit.machine.target.visible_gpus", lambda: ())
    result = probe(make_spec("gpu", {"unit.cu": ""}))
    assert result.state == "impossible" and "FLASHINFER_CUDA_ARCH_LIST" in result.reason


def test_impossible_when_frozen(make_spec, probe, monkeypatch):
    spec = make_spec()
    with freeze():
        assert probe(spec).reason.startswith("flashinfer.jit.freeze() forbids building it: no artifact")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    result = probe(spec)
    assert result.state == "impossible" and result.reason.startswith("FLASHINFER_DISABLE_JIT forbids")
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    spec.build()
    with freeze():
        assert probe(spec).state == "ready"


def test_impossible_without_sources(make_spec, probe):
    spec = make_spec()
    Path(spec.source_paths()[0]).unlink()
    result = probe(spec)
    assert result.state == "impossible" and "unit.cc" in result.reason


def test_needs_are_respected(make_spec, probe, tmp_path):
    wide = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    wide.covering({"dtype": ["float16"]}).build()
    assert probe(wide, {"dtype": ["float16"]}).state == "ready"
    result = probe(wide, {"dtype": ["bfloat16"]})
    assert result.state == "buildable" and "built without dtype bfloat16" in result.reason


def test_a_new_compiler_is_asked_and_nothing_is_written(make_spec, workspace, monkeypatch):
    """Only this case needs a process: whether this compiler made the existing artifact."""
    monkeypatch.setattr(toolchain, "_versions", {})
    spec = make_spec()
    artifact = spec.build()
    shutil.rmtree(workspace / "answers")
    monkeypatch.setattr(toolchain, "_versions", {})
    assert spec.probe() == Probe("ready", where=artifact.path) and not (workspace / "answers").exists()
    monkeypatch.setattr(toolchain, "_versions", {})
    look_up(spec)
    assert (workspace / "answers").exists(), "a lookup of a load stores the answer"


def test_the_value_is_frozen():
    with pytest.raises(AttributeError):
        Probe("ready").state = "impossible"  # type: ignore[misc]
