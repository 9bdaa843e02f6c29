"""Forks during another thread's first build: the child builds, and its parent does not wait for it."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from flashinfer.jit import process
from flashinfer.jit.lookup import Machine

from ..support.processes import answering, end, in_a_thread, start

# The main thread forks in the middle of a step of the first build. The child builds its own module and the
# same one, and outlives its parent's build.
FORK = """
    import ctypes, importlib.abc, os, subprocess, sys, threading, time
    import torch
    from flashinfer.jit import gen_jit_spec
    step, folder, same, other = sys.argv[1:]
    same, other = gen_jit_spec("same", [same]), gen_jit_spec("other", [other])
    reached, once = threading.Event(), []
    builder = threading.Thread(target=same.build_and_load)

    def pause():
        if threading.current_thread() is builder and not once:
            once.append(1)
            reached.set()
            time.sleep(0.5)  # the fork happens now, or waits until the step has ended

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == step:
                pause()

    def paused(function):
        def call(*arguments, **options):
            pause()
            result = function(*arguments, **options)
            return result
        return call

    sys.meta_path.insert(0, Finder())
    if step == "pipe":
        real = os.pipe
        def pipe():
            ends = real()
            pause()
            return ends
        os.pipe = pipe
    elif step == "start":
        subprocess.Popen._execute_child = paused(subprocess.Popen._execute_child)
    elif step == "tempfile":
        import tempfile
        tempfile._RandomNameSequence.__init__ = lambda self: pause()
    builder.start()
    assert reached.wait(100), "the step was never taken"
    child = os.fork()
    if child == 0:
        code = sum(ctypes.CDLL(str(spec.build().path)).answer() for spec in (other, same))
        deadline = time.monotonic() + 100
        while not os.path.exists(f"{folder}/ended") and time.monotonic() < deadline:
            time.sleep(0.05)
        os._exit(code if os.path.exists(f"{folder}/ended") else 99)
    builder.join()
    open(f"{folder}/ended", "w").close()
    print("the child says", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize(
    "step", ["flashinfer.jit.build", "filelock", "jinja2", "flashinfer.jit.lock", "start", "pipe", "tempfile"]
)
def test_a_fork_in_the_middle_of_a_step(step, make_spec, tmp_path):
    same, other = (make_spec(name, answering(value)).source_paths()[0] for name, value in (("same", 40), ("other", 2)))
    said = end(start(FORK, step, tmp_path, same, other))
    assert said.splitlines()[-1] == "the child says 42", said


def fork() -> int:
    """Fork, end the child at once, and return its exit code."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_a_step_of_another_thread():
    ended = threading.Event()

    def step() -> None:
        with process.without_forks():
            began.set()
            time.sleep(0.3)
            ended.set()

    began = threading.Event()
    thread = threading.Thread(target=step)
    thread.start()
    began.wait()
    assert fork() == 7 and ended.is_set()
    thread.join()
    assert in_a_thread(fork) == 7, "the first fork released the lock"


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 0.1)
    began, end_step = threading.Event(), threading.Event()

    def step() -> None:
        with process.without_forks():
            began.set()
            end_step.wait()

    thread = threading.Thread(target=step)
    thread.start()
    began.wait()
    child = os.fork()
    if child == 0:
        with process.without_forks():  # its own lock, which is free
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    end_step.set()
    thread.join()


def test_a_fork_of_the_thread_that_is_in_a_step():
    with process.without_forks():
        assert fork() == 7
    assert in_a_thread(fork) == 7


def test_a_pipe_stays_clear_of_standard_streams():
    """If the streams are closed, the next opened files get their descriptors."""
    saved = os.dup(2)
    try:
        os.close(2)
        theirs, ours = process.pipe()
        with pytest.raises(OSError):
            os.fstat(2)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert theirs > 2 and ours.fileno() > 2
    ours.close()
    assert os.read(theirs, 1) == b"" and ours.close() is None, "a second close closes nothing else"
    os.close(theirs)


def test_a_forked_child_keeps_no_end():
    theirs, ours = process.pipe()
    child = os.fork()
    if child == 0:
        time.sleep(600)
    ours.close()
    assert os.read(theirs, 1) == b""
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(theirs)


def test_a_program_that_does_not_end_is_killed():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        process.run(["sleep", "600"], timeout=0.2)
    assert time.monotonic() - began < 300


def test_cached_properties_take_no_lock(make_spec, monkeypatch):
    """``cached_property`` of Python 3.10 has one lock for all instances, which a fork could copy locked."""
    calls = []
    here = Machine(make_spec("tiny", answering(43)))
    monkeypatch.setattr("flashinfer.jit.lookup.toolchain_identity", lambda *arguments: calls.append(1) or fork())
    in_a_thread(lambda: here.identity)
    assert here.identity == 7 and len(calls) == 1
    for descriptor in vars(Machine).values():
        assert not hasattr(descriptor, "lock")
