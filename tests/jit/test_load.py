"""The mapped library is the verified one, whatever happens to its path."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from flashinfer.errors import ModuleLoadError
from flashinfer.jit import load
from flashinfer.jit.artifact import publish

ANSWERS = 'extern "C" __attribute__((visibility("default"))) int {name}() {{ return {value}; }}\n'


def in_process(path: Path) -> ctypes.CDLL:
    """Return the library loaded by this path. Raise OSError if there is none."""
    return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def answer(path: Path, name: str) -> int:
    return int(getattr(in_process(path), name)())


def test_a_file_replaced_after_the_check_is_not_mapped(make_spec, monkeypatch, tmp_path):
    """Another library takes the path between the digest and ``dlopen``. The verified bytes are loaded."""
    good = make_spec("good_mapped", {"unit.cc": ANSWERS.format(name="good_mapped", value=1)})
    evil = make_spec("evil_mapped", {"unit.cc": ANSWERS.format(name="evil_mapped", value=2)}).build()
    artifact, real = good.build(), load.map_library

    def replace_then_map(found, descriptor):
        shutil.copyfile(evil.path, tmp_path / "evil.so")
        os.replace(tmp_path / "evil.so", found.path)
        real(found, descriptor)

    monkeypatch.setattr(load, "map_library", replace_then_map)
    good.build_and_load()
    mapped = os.fsdecode(Path("/proc/self/maps").read_bytes())
    assert f"{artifact.path} (deleted)" in mapped, "the verified file, which has no name any more"
    assert not hasattr(in_process(artifact.path), "evil_mapped")
    assert answer(artifact.path, "good_mapped") == 1


def test_libraries_opened_through_one_descriptor_number_are_told_apart(make_spec):
    """glibc identifies a library by the name it was opened by, and names of descriptors are reused."""
    for number in range(3):
        name = f"told_apart_{number}"
        spec = make_spec(name, {"unit.cc": ANSWERS.format(name=name, value=number)})
        spec.build_and_load()
        assert answer(load.LOADED[name].path, name) == number
        assert not hasattr(in_process(load.LOADED[name].path), f"told_apart_{number - 1}")


def test_debuggers_see_the_path(make_spec):
    spec = make_spec("seen_by_debuggers", {"unit.cc": ANSWERS.format(name="seen_by_debuggers", value=3)})
    spec.build_and_load()
    path = str(load.LOADED[spec.name].path)

    class Info(ctypes.Structure):
        _fields_ = [
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("at", ctypes.c_void_p),
        ]

    info, function = Info(), in_process(Path(path)).seen_by_debuggers
    assert ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    assert info.file == path.encode() and path in torch.ops.loaded_libraries
    assert re.search(rf"{re.escape(path)}$", os.fsdecode(Path("/proc/self/maps").read_bytes()), re.MULTILINE)


def test_without_proc_the_path_is_used(make_spec, monkeypatch):
    spec = make_spec("without_proc", {"unit.cc": ANSWERS.format(name="without_proc", value=4)})
    spec.build()
    monkeypatch.setattr(load.os.path, "exists", lambda path: False)
    spec.build_and_load()
    monkeypatch.undo()
    assert answer(load.LOADED[spec.name].path, "without_proc") == 4


def test_a_loaded_module_without_the_needed_values(make_spec, tmp_path):
    wide = make_spec("narrowly_loaded", coverage={"dtype": ["float16", "bfloat16"]})
    publish(
        *(lambda a: (a.path, a.manifest))(wide.covering({"dtype": ["float16"]}).build()), tmp_path / "aot" / wide.name
    )
    load.load(wide, {"dtype": ["float16"]})
    with pytest.raises(ModuleLoadError, match="built for dtype float16; wanted bfloat16"):
        load.load(wide, {"dtype": ["bfloat16"]})
    load.load(wide, {"dtype": ["float16"]})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # torch has threads
def test_a_child_forked_while_a_thread_was_loading(make_spec):
    """The child has that thread's locks, but no thread that would release them."""
    spec = make_spec("loaded_by_a_child")
    spec.build()
    with load.module_locks.setdefault(spec.name, threading.Lock()):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                spec.build_and_load()
                os._exit(0 if spec.name in load.LOADED else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and spec.name not in load.LOADED
