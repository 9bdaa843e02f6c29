"""Files of the workspace deleted or truncated after, between or during builds: the next run is right."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from flashinfer.errors import BuildError, FlashInferError
from flashinfer.jit import clear_cache_dir
from flashinfer.jit.machine import toolchain
from flashinfer.jit.resolve import look_up

from ..support.processes import answer, answering, files_in, start, until
from ..support.slow import IN_CI

HOWS = ["deleted", "truncated"]
# Both kinds of damage for each file if there is time, otherwise the one that its name selects.
ways = pytest.mark.parametrize("how", HOWS if IN_CI else ["either"])


def chosen(path: Path, how: str) -> str:
    return HOWS[len(path.name) % 2] if how == "either" else how


def damage(path: Path, how: str) -> None:
    path.unlink() if chosen(path, how) == "deleted" else os.truncate(path, path.stat().st_size // 2)


@ways
def test_any_file_after_a_build(how, make_spec, tmp_path, workspace, monkeypatch):
    spec = make_spec("tiny", answering(15))
    spec.build()
    names = [path.relative_to(tmp_path) for path in files_in(workspace, tmp_path / "runtime")]
    assert {"tiny.so", "manifest.json", "tiny.json", "turn", "slot.0"} <= {name.name for name in names}
    for name in names:
        damage(tmp_path / name, how)
        monkeypatch.setattr(toolchain, "_versions", {})  # as in a new process
        assert answer(spec.build()) == 15, name
        assert look_up(spec).artifact is not None and look_up(spec).artifact.manifest["toolchain"]["cxx"], name
    clear_cache_dir()
    assert answer(spec.build()) == 15


class Interrupted:
    """A build of two files with one compiled, as a killed builder leaves it."""

    def __init__(self, make_spec, tmp_path: Path, monkeypatch) -> None:
        self.places = (tmp_path / "workspace", tmp_path / "runtime")
        self.saved, launcher = tmp_path / "saved", tmp_path / "launcher"
        self.count, quick = tmp_path / "count", tmp_path / "quick"
        launcher.write_text(
            f'#!/bin/sh\necho >> {self.count}\ncase "$*" in *b.cc*) test -e {quick} || sleep 60;; esac\nexec "$@"\n'
        )
        launcher.chmod(0o755)
        monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
        monkeypatch.setenv("MAX_JOBS", "1")
        (text,) = answering(16).values()
        self.spec = make_spec("two", {"a.cc": text, "b.cc": "int b;\n"})
        program = "import sys; from flashinfer.jit import gen_jit_spec; gen_jit_spec('two', sys.argv[1:]).build()"
        builder = start(program, *self.spec.source_paths())
        until(lambda: self.started == 2)
        os.kill(builder.pid, signal.SIGKILL)
        builder.communicate()
        quick.touch()
        until(lambda: try_hold_all(tmp_path / "runtime"))
        for place in self.places:
            shutil.copytree(place, self.saved / place.name)

    @property
    def started(self) -> int:
        return len(self.count.read_text()) if self.count.exists() else 0

    def restore(self) -> list[Path]:
        for place in self.places:
            shutil.rmtree(place)
            shutil.copytree(self.saved / place.name, place)
        return files_in(*self.places)


def try_hold_all(runtime: Path) -> bool:
    """Return whether all processes of a killed builder have ended: nothing is locked."""
    import fcntl

    for path in files_in(runtime):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


@ways
def test_any_file_of_an_interrupted_build(how, make_spec, tmp_path, monkeypatch):
    interrupted = Interrupted(make_spec, tmp_path, monkeypatch)
    names = {path.name for path in interrupted.restore()}
    assert {"a.o", "a.o.d", "a.o.json", "build.ninja", "graph.ninja", "run.json", ".ninja_log"} <= names
    before = interrupted.started
    assert answer(interrupted.spec.build()) == 16 and interrupted.started == before + 1, "only b.cc is compiled"
    for number in range(len(interrupted.restore())):
        path = interrupted.restore()[number]
        damage(path, how)
        assert answer(interrupted.spec.build()) == 16, path


@pytest.mark.parametrize("when", ["before", "after"])
@ways
def test_any_file_during_a_build(how, when, make_spec, tmp_path, monkeypatch):
    """Damage before or after the compiler: the result is right at once, or after one typed error."""
    launcher, pattern, action = (tmp_path / name for name in ("launcher", "pattern", "action"))
    actions = {"deleted": 'rm -f "$1"', "truncated": 'truncate -c -s 0 "$1"'}
    meddle = f'for file in $(cat {pattern}); do sh {action} "$file"; done; : > {pattern}\n'
    compile_it = '"$@" || exit\n'
    list_it = f"find {tmp_path}/workspace {tmp_path}/runtime -type f > {tmp_path}/listed\n"
    steps = [compile_it, list_it, meddle] if when == "after" else [list_it, meddle, compile_it]
    launcher.write_text("#!/bin/sh\n" + "".join(steps))
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    pattern.touch()
    make_spec("tiny", answering(0)).build()  # makes a history, as most machines have one
    shutil.rmtree(tmp_path / "workspace" / "artifacts")
    spec = make_spec("tiny", answering(17))
    spec.build()
    names = [Path(line).relative_to(tmp_path) for line in (tmp_path / "listed").read_text().splitlines()]
    assert {"build.ninja", "graph.ninja", "run.json"} <= {name.name for name in names}
    for name in names:
        clear_cache_dir()
        # The build directory has another name each time.
        parts = ["*" if part.count("-") == 1 and len(part) == 29 else part for part in name.parts]
        pattern.write_text(str(tmp_path.joinpath(*parts)))
        action.write_text(actions[chosen(name, how)])
        try:
            assert answer(spec.build()) == 17, name
        except FlashInferError as err:
            assert "tiny" in str(err), name
        assert pattern.read_text() == "", "the launcher has run"
        assert answer(spec.build()) == 17, name


def test_the_cache_is_cleared_during_a_build(make_spec, tmp_path, monkeypatch, workspace):
    """The module is built again once. Clearing the cache repeatedly is an error."""
    launcher, enough = tmp_path / "launcher", tmp_path / "enough"
    clear = f"rm -rf {workspace}/artifacts {workspace}/build {workspace}/history"
    launcher.write_text(f'#!/bin/sh\ntest -e {enough} || {clear}\ntouch {enough}\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    spec = make_spec("tiny", answering(18))
    assert answer(spec.build()) == 18
    clear_cache_dir()
    launcher.write_text(f'#!/bin/sh\n{clear}\nexec "$@"\n')
    with pytest.raises(BuildError, match="module 'tiny'"):
        spec.build()
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    assert answer(spec.build()) == 18
