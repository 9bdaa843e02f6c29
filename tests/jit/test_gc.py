"""Garbage collection: the least recently used artifacts go, those in use stay, and a kill does no harm."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from flashinfer import env
from flashinfer.errors import EnvironmentValueError
from flashinfer.jit import clear_cache_dir, load
from flashinfer.jit import gc as gc
from flashinfer.jit.gc import OLD, RECENT, collect, lock_name
from flashinfer.jit.lock import exclusive
from flashinfer.jit.resolve import look_up

DAY = 86400


@pytest.fixture
def artifact(workspace):
    """Return a function that makes a directory like an artifact of ``size`` bytes, last used ``days`` ago."""

    def make(name: str, size: int, days: float):
        place = workspace / "artifacts" / name / "key" / "build"
        place.mkdir(parents=True)
        (place / f"{name}.so").write_bytes(b"x" * (size - 2))
        (place / "manifest.json").write_bytes(b"{}")
        for path in (place / f"{name}.so", place / "manifest.json"):
            os.utime(path, (time.time() - days * DAY,) * 2)
        return place

    return make


@pytest.fixture
def aged(workspace):
    """Return a function that makes a file in the workspace. It and its parents are ``age`` seconds old."""

    def make(name: str, age: float):
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        for one in (path, *path.parents):
            if one == workspace:
                return path
            os.utime(one, (time.time() - age,) * 2)

    return make


def test_the_least_recently_used_go_first_and_no_more_than_needed(workspace, artifact):
    places = {name: artifact(name, 1000, days) for name, days in (("new", 1), ("oldest", 30), ("old", 20), ("mid", 5))}
    items = collect(workspace, 2500)
    assert [(item.path, bool(item.reason)) for item in items] == [
        (places["oldest"], True), (places["old"], True), (places["mid"], False), (places["new"], False),
    ]  # fmt: skip
    assert {name for name, place in places.items() if place.exists()} == {"mid", "new"}
    assert os.listdir(workspace / "trash") == []
    assert not any(item.reason for item in collect(workspace, 2500))


def test_a_dry_run_reports_the_same_and_removes_nothing(workspace, artifact, aged):
    for number in range(4):
        artifact(f"m{number}", 1000, number + 1)
    aged("build/0123/m/unit.o", OLD + 60)
    wanted = collect(workspace, 1500, dry_run=True)
    before = sorted(workspace.rglob("*"))
    assert collect(workspace, 1500, dry_run=True) == wanted and sorted(workspace.rglob("*")) == before
    assert collect(workspace, 1500) == wanted
    assert [item.path.exists() for item in wanted] == [not item.reason for item in wanted]
    assert sum(bool(item.reason) for item in wanted) == 4


def test_without_a_size_every_artifact_stays(workspace, artifact):
    place = artifact("m", 1000, 1000)
    assert [item.reason for item in collect(workspace)] == [""] and place.exists()


def test_recent_artifacts_stay(workspace, artifact):
    places = [artifact("now", 1000, 0), artifact("before", 1000, (RECENT - 60) / DAY), artifact("future", 1000, -3)]
    assert {item.obstacle for item in collect(workspace, 0)} == {"just built or used"}
    assert all(place.exists() for place in places)


def test_a_library_that_a_live_process_has_mapped_stays_until_it_ends(workspace, make_spec):
    artifacts = [make_spec(name).build() for name in ("used", "unused")]
    for one in artifacts:
        for path in one.directory.iterdir():
            os.utime(path, (0, 0))
    program = "import torch, ctypes, sys; ctypes.CDLL(sys.argv[1]); print('loaded', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program, artifacts[0].path], stdin=-1, stdout=-1)
    try:
        assert child.stdout.readline() == b"loaded\n"
        items = {item.path: item for item in collect(workspace, 0) if item.kind == "artifact"}
        assert items[artifacts[0].directory].obstacle == f"in use by process {child.pid}"
        assert artifacts[0].path.exists() and not artifacts[1].directory.exists()
    finally:
        child.communicate()
    collect(workspace, 0)
    assert not artifacts[0].directory.exists()


def test_a_removed_library_goes_on_working_where_it_is_mapped(workspace, make_spec, python, monkeypatch):
    """The library of a process that may not be inspected is removed. The process does not notice."""
    source = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    built = make_spec(files={"unit.cc": source}).build()
    for path in built.directory.iterdir():
        os.utime(path, (0, 0))
    program = "import torch, ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print(1, flush=True); sys.stdin.read(); print(lib.answer())"
    child = subprocess.Popen([sys.executable, "-c", program, built.path], stdin=-1, stdout=-1)
    child.stdout.readline()
    monkeypatch.setattr(gc, "_mapped_libraries", dict)
    collect(workspace, 0)
    assert not built.path.exists()
    assert child.communicate()[0] == b"42\n"


def test_removal_between_verification_and_use_never_shows_half_an_artifact(workspace, make_spec):
    """A process polls the artifact during its removal, and sees either all of it or nothing."""
    spec = make_spec()
    built = spec.build()
    for path in built.directory.iterdir():
        os.utime(path, (0, 0))
    stop, seen = threading.Event(), []

    def look():
        while not stop.is_set():
            with suppress(FileNotFoundError):
                names = sorted(os.listdir(built.directory))
                os.stat(built.directory)  # an opened directory can be listed even after its removal
                seen.append(names)

    reader = threading.Thread(target=look)
    reader.start()
    while not seen:
        time.sleep(0.001)
    collect(workspace, 0)
    stop.set()
    reader.join()
    assert all(names == ["manifest.json", "tiny.so"] for names in seen) and look_up(spec).artifact is None
    assert spec.build().path.exists()


def test_an_artifact_that_goes_between_its_verification_and_its_mapping_is_mapped(make_spec, python):
    spec = make_spec()
    spec.build()
    python(
        """
        import os, sys
        from flashinfer import env, jit
        from flashinfer.jit import gc
        from flashinfer.jit import load

        def remove_and_map(found, descriptor):
            os.utime(found.directory / "manifest.json", (0, 0))
            gc.collect(env.WORKSPACE_DIR.get(), 0)
            assert not found.path.exists()
            really_map(found, descriptor)

        really_map, load.map_library = load.map_library, remove_and_map
        jit.gen_jit_spec("tiny", [sys.argv[1]]).build_and_load()
        assert b"tiny.so" in open("/proc/self/maps", "rb").read()
        """,
        spec.sources[0],
    )
    assert look_up(spec).artifact is None


def test_old_build_directories_and_leftovers_go_and_live_ones_stay(workspace, aged):
    gone = [
        aged("build/0123/m/unit.o", OLD + 60),
        aged("artifacts/m/key/.build.x/m.so", OLD + 60),
        aged("sources/a/unit.cc", OLD + 60),
    ]
    gone.append(aged("trash/a/m.so", 5))
    stay = [aged("build/4567/m/unit.o", OLD - 60), aged("artifacts/m/key/.build.y/m.so", OLD - 60)]
    stay += [
        aged("build/ide/m/config.h", OLD * 9),
        aged("build/.ninja_log", OLD * 9),
        aged("mine/file", OLD * 9),
        aged("locks/a.lock", OLD * 9),
    ]
    # The directory is old, but a compiler has just written a file below it.
    stay.append(aged("build/89ab/m/deep/unit.o", 1))
    os.utime(workspace / "build" / "89ab", (0, 0))
    collect(workspace)
    assert [path.exists() for path in gone] == [False] * 4 and all(path.exists() for path in stay)


def test_trash_of_a_killed_collection_is_removed_next_time(workspace, artifact, monkeypatch):
    place = artifact("m", 1000, 9)
    monkeypatch.setattr(gc.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        collect(workspace, 0)
    monkeypatch.undo()
    assert not place.exists() and list((workspace / "trash").rglob("m.so"))
    collect(workspace)
    assert os.listdir(workspace / "trash") == []


def test_a_workspace_that_cannot_be_written_is_reported(workspace, artifact, monkeypatch):
    place = artifact("m", 1000, 9)

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(gc.os, "rename", refuse)
    assert [item.obstacle for item in collect(workspace, 0)] == ["cannot be removed: Read-only file system"]
    assert place.exists()


def test_a_link_out_of_the_workspace_is_not_followed(workspace, tmp_path, aged):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    os.utime(tmp_path / "precious", (0, 0))
    inside = aged("build/0123/m/unit.o", OLD + 60).parent
    (inside / "link").symlink_to(tmp_path / "precious")
    (workspace / "build" / "link").symlink_to(tmp_path / "precious")
    for path in (inside, inside.parent):
        os.utime(path, (0, 0))
    os.utime(inside / "link", (0, 0), follow_symlinks=False)
    collect(workspace, 0)
    assert not inside.exists() and (tmp_path / "precious" / "file").exists()


LOAD = """
import sys
from flashinfer import jit
jit.gen_jit_spec("tiny", [sys.argv[1]]).build_and_load()
"""


def test_a_load_marks_its_artifact_once_a_day(make_spec, python):
    spec = make_spec()
    manifest = spec.build().directory / "manifest.json"
    for age, marked in ((3 * DAY, True), (DAY / 2, False)):
        before = time.time() - age
        os.utime(manifest, (before, before))
        python(LOAD, spec.sources[0])
        assert (time.time() - manifest.stat().st_mtime < DAY / 4) == marked
        assert look_up(spec).artifact is not None


def test_a_load_marks_nothing_where_it_cannot_or_must_not(make_spec, python, tmp_path, monkeypatch):
    """In an AOT directory a mark would copy a file of the image's layer.

    In another user's workspace it fails.
    """
    spec = make_spec()
    built = spec.build()
    shutil.copytree(built.directory, tmp_path / "aot" / "tiny")
    manifest = tmp_path / "aot" / "tiny" / "manifest.json"
    os.utime(manifest, (5, 5))
    python(LOAD, spec.sources[0], FLASHINFER_AOT_DIR=str(tmp_path / "aot"))
    assert manifest.stat().st_mtime == 5
    os.utime(built.directory / "manifest.json", (5, 5))
    tried = []

    def refuse(path):
        tried.append(path)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(load.os, "utime", refuse)
    load.mark_used(built)
    assert tried == [f"{built.directory}/manifest.json"]


def test_after_a_build_the_workspace_is_brought_down_in_the_background(
    workspace, artifact, make_spec, monkeypatch, caplog
):
    places = [artifact("old", 100_000, 9), artifact("older", 100_000, 10)]
    caplog.set_level(logging.INFO, logger="flashinfer")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_MAX_SIZE", "150K")
    built = make_spec().build()
    for thread in threading.enumerate():
        if thread.name == "flashinfer-gc":
            assert thread.daemon
            thread.join()
    assert built.path.exists() and not places[1].exists() and "removed older" in caplog.text
    assert gc.env.WORKSPACE_MAX_SIZE.get() == 150 << 10


def test_a_tiny_limit_spares_modules_about_to_be_loaded(make_spec, python):
    for _ in range(2):
        python(LOAD, make_spec().sources[0], FLASHINFER_WORKSPACE_MAX_SIZE="0")


def test_collecting_all_the_time_does_not_disturb_a_build(workspace, make_spec):
    stop = threading.Event()

    def collect_on():
        while not stop.is_set():
            collect(workspace, 0)

    collector = threading.Thread(target=collect_on)
    collector.start()
    try:
        built = [make_spec(name).build() for name in ("one", "two")]
    finally:
        stop.set()
        collector.join()
    assert all(one.path.exists() for one in built)


def test_without_a_limit_no_thread_is_started(make_spec, artifact, monkeypatch):
    place = artifact("old", 100_000, 9)
    monkeypatch.setattr(gc.threading, "Thread", None)
    make_spec().build()
    assert place.exists()


def test_no_workspace_is_an_empty_one(tmp_path):
    assert collect(tmp_path / "none", 0) == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text, size",
    [("0", 0), ("500", 500), ("2k", 2048), ("1.5M", 3 << 19), ("2G", 2 << 30), ("1 TiB", 1 << 40), ("7B", 7)],
)
def test_sizes(text, size):
    assert env.parse_size(text) == size


@pytest.mark.parametrize("text", ["2X", "-1", "G", "1e9", "2 G B"])
def test_bad_sizes(text, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_MAX_SIZE", text)
    with pytest.raises(EnvironmentValueError, match="FLASHINFER_WORKSPACE_MAX_SIZE"):
        env.WORKSPACE_MAX_SIZE.get()


def test_one_process_removes_at_a_time(make_spec, workspace, monkeypatch):
    """A process without patience skips the collection.

    One with patience continues, because the other may be stopped.
    """
    make_spec("tiny").build()
    build = workspace / "build" / "left over"
    build.mkdir(parents=True)
    os.utime(build, (1, 1))
    monkeypatch.setattr("flashinfer.jit.gc.PATIENCE", 0.2)
    with exclusive(lock_name(workspace)) as ours:
        assert ours and collect(workspace, patience=0) == [] and build.exists()
        collect(workspace, patience=0.2)
        assert not build.exists()
        clear_cache_dir()
        assert not list(workspace.iterdir())
