"""Reporting has no other effect: a module is built with any standard error."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flashinfer import errors
from flashinfer.cli.main import main
from flashinfer.errors import BuildError, WorkspaceBuildError, WorkspaceError
from flashinfer.jit import JitSpec, events, lock, report, subscribe
from flashinfer.jit.build import failure, make_request
from flashinfer.jit.machine import workspace as workspaces
from flashinfer.jit.resolve import build_jit_specs, resolve

from ..support.processes import answer, answering

Make = Callable[..., JitSpec]


class Silent:
    """An object that a host program sets as standard error."""


class Failing:
    """A stream whose methods all fail."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name}")


class Writing:
    """A stream that can only write."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> io.TextIOBase:
    stream = io.StringIO()
    stream.close()
    return stream


def closed_file() -> io.TextIOWrapper:
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


def full_disk() -> io.TextIOWrapper:
    return open("/dev/full", "w", buffering=1)


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def closed_descriptor() -> io.TextIOWrapper:
    stream = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115
    os.close(stream.fileno())
    return stream


def lost_terminal() -> io.TextIOWrapper:
    """A terminal whose window is gone. It is a terminal until something is written (EIO)."""
    terminal, ours = pty.openpty()
    stream = open(ours, "w", buffering=1)  # noqa: SIM115
    os.close(terminal)
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


def none() -> None:
    return None


STREAMS = [
    none,
    Silent,
    Failing,
    Writing,
    closed,
    closed_file,
    full_disk,
    closed_pipe,
    closed_descriptor,
    lost_terminal,
]


@pytest.fixture(params=STREAMS, ids=lambda make: make.__name__)
def replace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Replace standard error by an unusual stream. pytest's own stream is set when a test begins."""
    made = request.param()

    def replace() -> object:
        monkeypatch.setattr(sys, "stderr", made)
        return made

    yield replace
    monkeypatch.undo()
    if isinstance(made, io.TextIOWrapper):
        with suppress(OSError):
            made.close()


def test_a_build_with_an_unusual_standard_error(replace, make_spec, monkeypatch, capsys):
    """With progress, verbose commands and a compiler that fails."""
    stream = replace()
    monkeypatch.setattr("flashinfer.jit.history.REPORT_INTERVAL", 0.0)
    good, bad = make_spec("good", answering(31)), make_spec("bad", {"unit.cc": "no C++\n"})
    with pytest.raises(BuildError, match="building module 'bad' failed: .*error") as caught:
        build_jit_specs([bad, good], verbose=True)
    assert type(caught.value) is BuildError
    assert answer(good.build()) == 31
    assert capsys.readouterr().out == "", "text for standard error goes nowhere else"
    if isinstance(stream, Writing):
        assert "building bad, good" in stream.text and "flashinfer: " in stream.text


def test_warnings_and_logs_with_an_unusual_standard_error(replace, make_spec, tmp_path, monkeypatch):
    """A workspace's fallback warns. A subscriber fails and is logged by a handler of the stream."""
    stream = replace()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "file" / "workspace"))
    monkeypatch.setattr(workspaces, "_fallbacks", {})
    handler, logger = logging.StreamHandler(stream or io.StringIO()), logging.getLogger("flashinfer")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    end = subscribe(lambda event: 1 / 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # As ``warnings`` does. pytest's replacement expects only OSError from a stream.
            monkeypatch.setattr(warnings, "_showwarnmsg_impl", lambda message: stream and stream.write(str(message)))
            assert answer(make_spec("tiny", answering(32)).build()) == 32
    finally:
        end()
        logger.removeHandler(handler)


def test_a_warning_that_is_an_error_stays_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "file" / "workspace"))
    monkeypatch.setattr(workspaces, "_fallbacks", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="cannot be written"):
            workspaces.workspace()


def test_commands_with_an_unusual_standard_error(replace, aot, make_spec, monkeypatch, tmp_path, capsys):
    specs = [make_spec("good", answering(38)), make_spec("bad", {"unit.cc": "no C++\n"})]
    monkeypatch.setattr(aot, "matrix_specs", lambda matrix, names: specs)
    replace()
    assert aot.main(["--out-dir", str(tmp_path / "out"), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["how"] for row in rows} == {"good": "built", "bad": "failed"}
    assert main(["why", "no-such-module"]) == 2


@pytest.mark.parametrize("stdout", ["/dev/full", "closed", "pipe"])
def test_a_command_whose_output_cannot_be_written(stdout, python, tmp_path):
    """A full disk is an error that is reported. A closed or missing reader is none."""
    program = f"""
        import os, sys
        if {stdout == "closed"}:
            sys.stdout = None
        else:
            reader, writer = os.pipe()
            os.close(reader)
            place = writer if {stdout == "pipe"} else os.open("/dev/full", os.O_WRONLY)
            os.dup2(place, 1)
        from flashinfer.cli.main import main
        sys.exit(main(["list", "--json"]))
    """
    done = python(program, check=False)
    assert done.returncode == (1 if stdout == "/dev/full" else 0)
    wanted = f"error: [Errno {errno.ENOSPC}] No space left on device\n" if stdout == "/dev/full" else ""
    assert done.stderr == wanted


def test_a_failing_display_is_not_called_again(make_spec, caplog):
    calls = []

    def display(progress: object) -> None:
        calls.append(progress)
        raise OSError(errno.EIO, "the terminal is gone")

    (outcome,) = resolve([make_request(make_spec("tiny", answering(33)))], watch=display)
    assert outcome.how == "built" and answer(outcome.artifact) == 33
    assert len(calls) == 1 and "the terminal is gone" in caplog.text


def test_text_goes_out_whole_and_in_order(tmp_path, monkeypatch):
    """Text bypasses the buffer but follows the program's own output.

    Characters without an encoding are escaped.
    """
    with open(tmp_path / "said", "w", encoding="ascii", errors="backslashreplace") as file:
        monkeypatch.setattr(sys, "stderr", file)
        file.write("first\n")
        report.say("sécond")
        file.write("third\n")
    assert (tmp_path / "said").read_text() == "first\nflashinfer: s\\xe9cond\nthird\n"


def test_only_a_path_of_the_workspace_is_its_fault(workspace):
    def of(err: Exception) -> BuildError:
        return failure("tiny", "cannot build", err, workspace)

    inside = OSError(errno.ENOSPC, "No space left on device", str(workspace / "build" / "x"))
    second = OSError(errno.EXDEV, "Invalid cross-device link", "/elsewhere", None, str(workspace / "x"))
    for err in (inside, second):
        assert type(of(err)) is WorkspaceBuildError and isinstance(of(err), WorkspaceError)
    for err in (OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOENT, "none", "/usr/bin/ninja"),
                OSError(errno.EIO, "Input/output error", 2), OSError(errno.EIO, "", f"{workspace}-other")):  # fmt: skip
        assert type(of(err)) is BuildError and str(err) in str(of(err))


def test_errors_of_writing_name_the_path(tmp_path, monkeypatch, make_spec, workspace):
    """Errors of write and fsync name no path themselves."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = make_spec("tiny", answering(34)).build()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*/file'"):
        workspaces.write_atomically(tmp_path / "folder" / "file", b"x")
    spec = make_spec("other", answering(35))
    monkeypatch.setattr(workspaces, "_why_not_usable", lambda root: None)
    with pytest.raises(WorkspaceBuildError, match=rf"No space left on device: '{workspace}"):
        spec.build()
    monkeypatch.undo()
    assert answer(made) == 34


def test_too_many_open_files_are_not_the_workspaces_fault(make_spec, monkeypatch):
    def none_left(*arguments: object) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    spec = make_spec("tiny", answering(36))
    monkeypatch.setattr("os.pipe", none_left)
    with pytest.raises(BuildError, match=r"cannot build: \[Errno 24\] Too many open files") as caught:
        spec.build()
    assert not isinstance(caught.value, WorkspaceError)


def test_a_source_that_is_gone_is_not_the_destinations_fault(make_spec, monkeypatch, tmp_path):
    """The source is removed during its compilation."""
    spec = make_spec("tiny", answering(37))
    source = Path(spec.source_paths()[0])
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\n"$@"\nstatus=$?\nrm -f {source}\nexit $status\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    with pytest.raises(BuildError) as caught:
        spec.build()
    assert not isinstance(caught.value, WorkspaceError) and "cannot publish" not in str(caught.value)
    assert source.name in str(caught.value)


def test_all_output_goes_through_one_file():
    """No other file of the package writes to standard error or checks whether it is a terminal."""
    package = Path(errors.__file__).parent
    door = {package / "jit" / "report.py", *(package / "jit" / "worker").glob("*.py")}
    found = [
        f"{path.relative_to(package)}: {word}"
        for path in package.rglob("*.py")
        if path not in door
        for word in ("file=sys.stderr", "sys.stderr.write", "sys.stdout.write", ".isatty()", "sys.__stderr__")
        if word in path.read_text()
    ]
    assert not found


def test_a_wait_with_a_lost_terminal(monkeypatch):
    monkeypatch.setattr(lock, "FIRST_REPORT", 0.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom flashinfer.jit.lock import try_hold\nhold = try_hold('x', 'tiny')"
         "\nprint('held', flush=True)\nsys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    published = iter([False, False, True])
    monkeypatch.setattr(lock, "LOOKUP_INTERVAL", 0.1)
    with lost_terminal() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert lock.wait("x", "tiny", lambda: next(published)) is None
        monkeypatch.undo()
    holder.communicate()


def test_an_event_while_a_signal_handler_emits(monkeypatch):
    """The handler runs in the thread that holds the lock of the sums."""
    with events.guard:
        events.emit("hit", "from-a-handler")
    assert events.stats()["modules"]["from-a-handler"]["hit"]["count"] == 1
