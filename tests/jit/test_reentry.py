"""A thread that requests the module that it is building gets an error, and user files are not imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from flashinfer.errors import BuildError, ReentrantBuildError
from flashinfer.jit import build_jit_specs, subscribe
from flashinfer.jit.build import make_request
from flashinfer.jit.lock import exclusive, try_hold, wait
from flashinfer.jit.resolve import resolve

from ..support.processes import ROOT, answer, answering, end, in_a_thread, python_path, start

REFUSED = "building module 'tiny' failed: this thread is already building it"
HANDLE = """
    import ctypes, os, signal, sys
    import torch
    from flashinfer.errors import ReentrantBuildError
    from flashinfer.jit import gen_jit_spec
    first, again, folder = sys.argv[1:4]
    tiny, other = gen_jit_spec("tiny", sys.argv[4:5]), gen_jit_spec("other", sys.argv[5:])
    def ask(how, spec):
        spec.build_and_load() if how == "load" else spec.build()
    said = []
    def handle(number, frame):
        open(f"{folder}/sent", "w").close()
        try:
            ask(again, tiny)
        except ReentrantBuildError as err:
            said.append(f"{err.name}: {err}")
        said.append(ctypes.CDLL(str(other.build().path)).answer())
    signal.signal(signal.SIGUSR1, handle)
    with open(f"{folder}/pid", "w") as file:
        file.write(str(os.getpid()))
    ask(first, tiny)
    print(said, ctypes.CDLL(str(tiny.build().path)).answer())
"""


@pytest.mark.parametrize(
    "first, again", [("build", "build"), pytest.param("load", "build", marks=pytest.mark.slow), ("load", "load")]
)
def test_a_signal_handler_requests_the_module_of_its_thread(first, again, make_spec, tmp_path, monkeypatch):
    """The compiler sends the signal. Another module is built in the handler."""
    launcher = tmp_path / "launcher"
    send = f"kill -USR1 $(cat {tmp_path}/pid)\nwhile ! test -e {tmp_path}/sent; do sleep 0.05; done"
    launcher.write_text(f'#!/bin/sh\nif ! test -e {tmp_path}/sent; then {send}; fi\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    sources = [make_spec(name, answering(value)).source_paths()[0] for name, value in (("tiny", 51), ("other", 52))]
    last = end(start(HANDLE, first, again, tmp_path, *sources)).splitlines()[-1]
    assert last.startswith(f'["tiny: {REFUSED}') and last.endswith(", 52] 51")


def test_a_subscriber_requests_the_module_being_built(make_spec):
    """The subscriber is called in the building thread, and the build continues."""
    spec, other, said = make_spec("tiny", answering(53)), make_spec("other", answering(54)), list[str]()

    def ask(event: object) -> None:
        if getattr(event, "kind", "") == "compile" and getattr(event, "module", "") == "tiny":
            try:
                build_jit_specs([spec])
            except BuildError as err:
                said.append(f"{type(err).__name__}: {err}")
            said.append(str(answer(other.build())))

    stop = subscribe(ask)
    try:
        assert [outcome.how for outcome in resolve([make_request(spec)])] == ["built"]
    finally:
        stop()
    # The module is already published at that time, so it is found.
    assert said == ["54"] and answer(spec.build()) == 53


def test_a_lock_knows_its_thread(tmp_path):
    hold = try_hold("x", "tiny")
    assert hold is not None
    with pytest.raises(ReentrantBuildError, match=REFUSED) as caught:
        try_hold("x", "tiny")
    assert caught.value.name == "tiny" and isinstance(caught.value, BuildError)
    with pytest.raises(ReentrantBuildError):
        wait("x", "tiny", lambda: False)
    assert in_a_thread(lambda: try_hold("x", "tiny")) is None, "another thread waits"
    assert try_hold("y", "tiny") is not None, "a lock without references is free"
    assert try_hold("y", "tiny") is not None
    hold.abandon()
    again = try_hold("x", "tiny")
    assert again is not None
    hold.abandon()  # a second call releases nothing
    with pytest.raises(ReentrantBuildError):
        try_hold("x", "tiny")
    again.release()
    taken = in_a_thread(lambda: try_hold("x", "tiny"))
    assert taken is not None
    taken.release()


def test_nested_housekeeping_does_nothing():
    with exclusive("history") as ours, exclusive("history") as inner:
        assert ours and not inner
    with exclusive("history") as ours:
        assert ours


def test_one_of_several_is_being_built(make_spec):
    """The other modules are built."""
    tiny, other = make_request(make_spec("tiny", answering(55))), make_request(make_spec("other", answering(56)))
    hold = try_hold(f"{tiny.build_key} {tiny.destination.parents[3].resolve()}", "tiny")
    outcomes = resolve([tiny, other])
    assert [outcome.how for outcome in outcomes] == ["failed", "built"]
    assert isinstance(outcomes[0].error, ReentrantBuildError)
    assert hold is not None
    hold.release()


def test_two_threads_request_one_module(make_spec, compilers_started):
    """This is no re-entry: one thread builds, the other waits."""
    spec, answers = make_spec("tiny", answering(57)), list[int]()
    threads = [threading.Thread(target=lambda: answers.append(answer(spec.build()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [57] * 3 and compilers_started() == 1


IMPORTS = """
    import ctypes, fcntl, sys
    import torch
    how, source = sys.argv[1:]
    locked, taken, imported = set(), [], []
    LOCKS = {("lock.py", "try_hold"), ("lock.py", "exclusive"), ("lock.py", "wait")}

    def callers():
        frame = sys._getframe(2)
        while frame is not None:
            yield tuple(frame.f_code.co_filename.rsplit("/", 1)[1:]) + (frame.f_code.co_name,)
            frame = frame.f_back

    def watch(event, arguments):
        if event == "fcntl.flock":
            descriptor, operation = arguments
            taken.append(descriptor)
            (locked.discard if operation & fcntl.LOCK_UN else locked.add)(descriptor)
        elif event == "import":
            loading = getattr(sys.modules.get("flashinfer.jit.load"), "_loading", ())
            if locked or loading or not LOCKS.isdisjoint(callers()):
                imported.append(arguments[0])

    from flashinfer.jit import gen_jit_spec
    sys.addaudithook(watch)
    spec = gen_jit_spec("tiny", [source])
    try:
        spec.build_and_load() if how == "load" else spec.build()
    except Exception as err:
        print(type(err).__name__, end=" ")
    print(bool(taken), imported)
"""


@pytest.mark.parametrize("how", ["build", "load", "failure", "fetch"])
def test_nothing_is_imported_under_a_lock(how, make_spec, tmp_path, monkeypatch):
    """An import may execute a user's file of that name, which may request the module that is being built."""
    spec = make_spec("tiny", {"unit.cc": "no C++\n"} if how == "failure" else answering(60))
    if how == "fetch":
        monkeypatch.setenv("FLASHINFER_STORE", f"unsigned+file://{tmp_path}/store")
        monkeypatch.setenv("FLASHINFER_STORE_PUBLISH", "1")
        spec.build()
        shutil.rmtree(tmp_path / "workspace")
    said = end(start(IMPORTS, how, spec.source_paths()[0])).splitlines()[-1]
    assert said == ("BuildError " if how == "failure" else "") + "True []"


# Standard modules that flashinfer (shlex, sysconfig) and filelock (decimal, secrets) import in addition to
# torch's.
KNOWN = {"shlex", "sysconfig", "decimal", "_decimal", "_pydecimal", "secrets", "hmac"}


def test_files_named_like_standard_modules_are_not_executed(make_spec, tmp_path):
    """Files next to a program are named like all standard modules that torch has not imported."""
    program = """if True:
        import sys, torch
        from importlib.util import find_spec
        left = sys.stdlib_module_names - {name.partition(".")[0] for name in sys.modules}
        print(*(name for name in left if find_spec(name)))
    """
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    folder = tmp_path / "program"
    folder.mkdir()
    for name in set(names.stdout.split()) - KNOWN:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n")
    assert {"code", "cmd", "pdb"} <= {path.stem for path in folder.iterdir()}
    text = """
        import sys
        import torch
        from flashinfer.jit import gen_jit_spec, prefetch
        good, bad, ahead = (gen_jit_spec(f"m{number}", [path]) for number, path in enumerate(sys.argv[1:]))
        try:
            bad.build()
        except Exception as err:
            assert type(err).__name__ == "BuildError", err
        prefetch([ahead]).wait()
        good.build_and_load()
        print("loaded", ahead.build().name)
    """
    (folder / "program.py").write_text(textwrap.dedent(text))
    files = [answering(58), {"unit.cc": "no C++\n"}, answering(59)]
    sources = [make_spec(f"m{number}", one).source_paths()[0] for number, one in enumerate(files)]
    done = subprocess.run(
        [sys.executable, folder / "program.py", *sources], capture_output=True, text=True, env=environment, cwd=folder
    )
    executed = (tmp_path / "executed").read_text() if (tmp_path / "executed").exists() else ""
    assert executed == "" and done.stdout.endswith("loaded m2\n"), done.stdout + done.stderr
