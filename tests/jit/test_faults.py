"""Read-only, full or missing directories, no locks, damage, forks, captures: right, or a typed error."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from flashinfer.errors import CaptureError, WorkspaceError
from flashinfer.jit import build_jit_specs
from flashinfer.jit.lock import runtime_directory, try_hold

from ..support.processes import ROOT, answer, answering, end, files_in, python_path, start, until

BUILD = """
    import ctypes, sys, warnings
    from flashinfer.errors import FlashInferError
    from flashinfer.jit import gen_jit_spec
    warnings.simplefilter("always")
    for source in sys.argv[1:]:
        try:
            path = gen_jit_spec("tiny", [source]).build().path
            print("built", path, ctypes.CDLL(str(path)).answer())
        except FlashInferError as err:
            print("refused", type(err).__name__, err)
"""


# Directories


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting a small file system takes root and unshare(1)")


def in_a_mount(folder: Path, options: str, prepare: str, program: str, *arguments: str) -> tuple[list[str], str]:
    """Return output lines and errors of a program that sees a small file system of its own at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'set -e; mount -t tmpfs -o mode=700,{options} tmpfs "$1"; cd "$1"; {prepare}\nshift; cd /; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", folder, sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines(), result.stderr


FILL = "head -c 100m /dev/zero > filler 2> /dev/null || true"


@needs_mounts
@pytest.mark.parametrize(
    "options, prepare, reason",
    [
        ("size=1m", FILL, "No space left on device"),
        ("size=1m,nr_inodes=3", "touch a b 2> /dev/null || true", "No space left on device"),
        ("size=1m", "mount -o remount,ro .", "Read-only file system"),
    ],
    ids=["full", "no-inodes", "read-only"],
)
def test_a_workspace_that_accepts_no_file(options, prepare, reason, make_spec, workspace):
    source = make_spec("tiny", answering(4)).source_paths()[0]
    (built,), said = in_a_mount(workspace, options, prepare, BUILD, source)
    assert f"cannot be written ({reason})" in said and "set FLASHINFER_WORKSPACE_DIR" in said
    assert not built.startswith(f"built {workspace}") and built.endswith(" 4")


@needs_mounts
def test_a_workspace_that_becomes_full(make_spec, workspace):
    """The disk fills during a build. The error names it, and the next build is right."""
    files = answering(5)
    files["unit.cc"] += "extern const char data[];\nconst char data[1 << 20] = {1};\n"
    source = make_spec("tiny", files).source_paths()[0]
    program = BUILD.replace('print("refused"', f'__import__("os").unlink("{workspace}/filler"); print("refused"')
    prepare = "head -c 3300k /dev/zero > filler"
    (refused, *_, built), _ = in_a_mount(workspace, "size=4m", prepare, program, source, source)
    assert refused.startswith("refused BuildError") and "No space left on device" in refused
    assert built.startswith(f"built {workspace}") and built.endswith(" 5")


@needs_mounts
@pytest.mark.parametrize("prepare", [FILL, "mount -o remount,ro ."], ids=["full", "read-only"])
def test_a_hit_in_a_workspace_that_accepts_no_file(prepare, make_spec, tmp_path, workspace, compilers_started):
    spec = make_spec("tiny", answering(6))
    spec.build()
    os.rename(workspace, tmp_path / "saved")
    prepare = f"cp -a {tmp_path}/saved/. .; {prepare}"
    (built,), said = in_a_mount(workspace, "size=4m", prepare, BUILD, spec.source_paths()[0])
    assert built.startswith(f"built {workspace}") and built.endswith(" 6") and said == ""
    assert compilers_started() == 1


@needs_mounts
@pytest.mark.parametrize("prepare", [FILL, "mount -o remount,ro ."], ids=["full", "read-only"])
def test_no_room_for_locks(prepare, make_spec, tmp_path, workspace):
    """The module is built without locks and limits, which is better than no build."""
    (source,) = make_spec("tiny", answering(7)).source_paths()
    (built,), _ = in_a_mount(tmp_path / "runtime", "size=64k", prepare, BUILD, source)
    assert built.startswith(f"built {workspace}") and built.endswith(" 7")


def test_no_directory_for_locks(make_spec, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_RUNTIME_DIR", str(tmp_path / "file" / "runtime"))
    assert runtime_directory() is None
    assert answer(make_spec("tiny", answering(8)).build()) == 8


def test_another_users_directory_for_locks_is_not_used(make_spec, tmp_path, monkeypatch):
    place = runtime_directory()
    assert place == tmp_path / "runtime" / f"flashinfer-{os.geteuid()}" and place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    assert runtime_directory() is None
    place.rmdir()
    place.symlink_to(tmp_path)
    assert runtime_directory() is None
    assert answer(make_spec("tiny", answering(9)).build()) == 9


def test_the_session_directory_comes_before_the_temporary_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHINFER_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    assert runtime_directory().parent == tmp_path / "session"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    assert runtime_directory().parent == tmp_path / "temporary"


def test_no_directory_at_all(make_spec, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "file" / "workspace"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file" / "temporary"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file" / "session"))
    with pytest.raises(WorkspaceError, match=r"workspace .* cannot be written .*, and neither can a temporary"):
        make_spec().build()


def test_a_workspace_that_is_gone(make_spec, workspace):
    spec = make_spec("tiny", answering(11))
    spec.build()
    shutil.rmtree(workspace)
    assert answer(spec.build()) == 11


def test_an_open_umask_opens_nothing(make_spec, workspace, tmp_path, monkeypatch):
    """Neither during the build nor after it."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\n"$@"\nfind {workspace} {tmp_path}/runtime -perm /022 >> {tmp_path}/open\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    before = os.umask(0)
    try:
        spec = make_spec("tiny", answering(21))
        for path in [tmp_path / "src", *(tmp_path / "src").rglob("*")]:
            path.chmod(0o755)
        assert answer(spec.build()) == 21
    finally:
        os.umask(before)
    found = subprocess.run(["find", workspace, tmp_path / "runtime", "-perm", "/022"], capture_output=True, text=True)
    assert (tmp_path / "open").read_text() == "" == found.stdout


# Locks


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO, errno.EACCES])
def test_a_file_system_without_locks(code, make_spec, monkeypatch):
    """An OSError never means "busy"."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    began = time.monotonic()
    spec = make_spec("tiny", answering(12))
    first, second = try_hold("x", "tiny"), try_hold("x", "tiny")
    assert first is not None and second is not None and first.token != second.token
    assert answer(spec.build()) == 12 and time.monotonic() - began < 300


def test_many_processes_without_locks(make_spec, workspace):
    """Each process compiles in a directory of its own. All publish, and all are right."""
    prelude = "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOLCK, 'none')\nfcntl.flock = flock\n"
    source = make_spec("tiny", answering(13)).source_paths()[0]
    said = [end(process) for process in [start(prelude + textwrap.dedent(BUILD), source) for _ in range(4)]]
    assert all(text.splitlines()[-1].startswith("built ") and text.endswith(" 13\n") for text in said)
    assert not list((workspace / "build").iterdir()), "no build directory is left"


def test_the_directory_for_locks_is_cleaned_up_during_a_build(make_spec, tmp_path, monkeypatch, workspace):
    """A later process has another lock and so another directory. Both build and do not disturb each other."""
    once, launcher = tmp_path / "once", tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\ntest -e {once} || {{ touch {once}; rm -rf {tmp_path}/runtime; sleep 1; }}\nexec "$@"\n'
    )
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    spec = make_spec("tiny", answering(14))
    first = start(BUILD, spec.source_paths()[0])
    until(once.exists)
    until(lambda: not (tmp_path / "runtime").exists() or list((workspace / "build").iterdir()))
    assert answer(spec.build()) == 14
    assert end(first).endswith(" 14\n")


# Forks, threads, captures


def test_a_fork_while_a_thread_builds(make_spec, tmp_path, monkeypatch):
    """The child has none of the thread's locks, and builds the same module and another one."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\ntouch {tmp_path}/began\nsleep 0.5\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    (same,) = make_spec("same", answering(19)).source_paths()
    (other,) = make_spec("other", answering(20)).source_paths()
    program = """
        import ctypes, os, sys, threading, time
        from flashinfer.jit import gen_jit_spec
        same, other = gen_jit_spec("same", [sys.argv[1]]), gen_jit_spec("other", [sys.argv[2]])
        answer = lambda spec: ctypes.CDLL(str(spec.build().path)).answer()
        thread = threading.Thread(target=answer, args=[same])
        thread.start()
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            os._exit(answer(other) + answer(same))
        thread.join()
        print("the child says", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "the parent", answer(same))
    """
    assert end(start(program, same, other, tmp_path / "began")).endswith("the child says 39 the parent 19\n")


def test_threads_build_different_modules(make_spec, compilers_started):
    specs = [make_spec(f"m{number}", answering(number)) for number in range(4)]
    answers: list[int] = []
    threads = [threading.Thread(target=lambda spec=spec: answers.append(answer(spec.build()))) for spec in specs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0, 0, 1, 1, 2, 2, 3, 3] and compilers_started() == 4


def test_a_miss_during_capture(make_spec, monkeypatch, workspace):
    """A miss raises before anything is started.

    A hit of a CPU module is fine, loading one for CUDA is not.
    """
    spec, built = make_spec("wanted"), make_spec("built")
    built.build()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = files_in(workspace)
    with pytest.raises(CaptureError, match=r"module 'wanted' is not built, .*once before the capture"):
        spec.build()
    with pytest.raises(CaptureError):
        build_jit_specs([built, spec])
    with pytest.raises(CaptureError, match=r"module 'tiny' would be loaded, .* call flashinfer.warmup\(\)"):
        make_spec(backend="cuda").build_and_load()
    assert files_in(workspace) == before and built.build().path.exists() and built.build_and_load()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert spec.build().path.exists()
