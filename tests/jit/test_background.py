"""``prefetch``: a child of low priority that fetches and builds, and ends with its parent."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import CancelledError

import pytest

from flashinfer.errors import BuildError, JitFrozenError
from flashinfer.jit import freeze, prefetch
from flashinfer.jit.resolve import look_up

from ..support.processes import Compiler, answer, answering, owners, start, until


@pytest.fixture
def slow(tmp_path, monkeypatch) -> Compiler:
    compiler = Compiler(tmp_path)
    compiler.hold()
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def test_a_load_waits_for_it(make_spec, slow, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_EVENTS", str(tmp_path / "events"))
    spec = make_spec("tiny", answering(7))
    coming = prefetch([spec])
    until(lambda: slow.started)
    assert not coming.done
    nice, (owner,) = min(os.nice(0) + 10, 19), owners(tmp_path / "runtime")
    assert os.getpriority(os.PRIO_PROCESS, owner["pid"]) == nice
    with pytest.raises(TimeoutError, match="prefetch: 1 modules are not all ready"):
        coming.wait(0.01)
    slow.release()
    assert answer(spec.build()) == 7
    coming.wait()
    assert coming.done and slow.started == 2, "one compiler and one linker, for both builders"
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [one["pid"] for one in events if one["kind"] == "compile"] == [owner["pid"]]
    coming.cancel()
    coming.wait()


def test_errors_are_those_of_a_build(make_spec):
    good, broken = make_spec("good", answering(7)), make_spec("broken", {"unit.cc": "int here = nowhere;\n"})
    with pytest.raises(BuildError, match="building module 'broken' failed") as caught:
        prefetch([broken, good]).wait()
    assert "nowhere" in caught.value.output and answer(look_up(good).artifact) == 7
    with freeze(), pytest.raises(JitFrozenError):
        prefetch([broken]).wait()


def test_cancel_ends_the_compilers(make_spec, slow):
    spec = make_spec("tiny", answering(7))
    coming = prefetch([spec])
    until(lambda: slow.started)
    coming.cancel()
    assert coming.done
    slow.release()
    with pytest.raises(CancelledError):
        coming.wait()
    assert answer(spec.build()) == 7


def test_it_ends_with_its_parent(make_spec, slow, tmp_path):
    spec = make_spec("tiny", answering(7))
    parent = start(
        """
        import sys, time
        from flashinfer.jit import gen_jit_spec, prefetch
        coming = prefetch([gen_jit_spec("tiny", [sys.argv[1]])])
        print("waits", flush=True)
        time.sleep(600)
        """,
        spec.source_paths()[0],
    )
    assert parent.stdout.readline() == "waits\n"
    until(lambda: slow.started)
    child = owners(tmp_path / "runtime")[0]["pid"]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    def is_gone() -> bool:
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_gone)
    slow.release()
    assert answer(spec.build()) == 7
