"""The header scan finds every file that a compiler would read, and possibly more."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from flashinfer.jit import spec as module
from flashinfer.jit.spec import closure


def reach(tmp_path, files: dict[str, str], *include_dirs: str) -> set[str]:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = closure([f"{tmp_path}/a.cc"], [f"{tmp_path}/{name}" for name in include_dirs])
    return {path.removeprefix(f"{tmp_path}/") for path in found}


def test_quotes_brackets_and_spaces(tmp_path):
    files = {
        "a.cc": '#include "b.h"\n  #  include <inc/c.h> // why\n#include <vector>\n',
        "b.h": "",
        "inc/c.h": "",
        "d.h": "",
    }
    assert reach(tmp_path, files, ".") == {"a.cc", "b.h", "inc/c.h"}


def test_next_to_the_including_file_first(tmp_path):
    files = {"a.cc": '#include "x/b.h"\n', "x/b.h": '#include "c.h"\n', "x/c.h": "", "inc/c.h": ""}
    assert reach(tmp_path, files, "inc") == {"a.cc", "x/b.h", "x/c.h"}


def test_both_sides_of_a_conditional(tmp_path):
    files = {"a.cc": '#if A\n#include "b.h"\n#else\n#include "c.h"\n#endif\n', "b.h": "", "c.h": ""}
    assert reach(tmp_path, files) == {"a.cc", "b.h", "c.h"}


def test_cycles_and_parents(tmp_path):
    files = {"a.cc": '#include "x/b.h"\n', "x/b.h": '#include "../c.h"\n', "c.h": '#include "x/b.h"\n'}
    assert reach(tmp_path, files) == {"a.cc", "x/b.h", "c.h"}


def test_a_continued_line(tmp_path):
    assert reach(tmp_path, {"a.cc": '#include \\\n "b.h"\n', "b.h": ""}) == {"a.cc", "b.h"}


def test_a_changed_header_is_read_again(tmp_path):
    assert reach(tmp_path, {"a.cc": '#include "b.h"\n', "b.h": "", "c.h": ""}) == {"a.cc", "b.h"}
    assert reach(tmp_path, {"b.h": '#include "c.h"\n'}) == {"a.cc", "b.h", "c.h"}


@pytest.mark.parametrize("age, reads", [(0.0, 2), (60.0, 1)], ids=["written just now", "written a minute ago"])
def test_a_file_written_just_now_is_read_again(tmp_path, monkeypatch, age, reads):
    """A file system's clock may not move between two edits. Then only the bytes differ."""
    path = tmp_path / "a.h"
    path.write_text("// 1")
    real = os.stat(path)
    at = time.time_ns() - int(age * 1e9)
    status = SimpleNamespace(st_ino=real.st_ino, st_size=4, st_mtime_ns=at, st_ctime_ns=at)
    read = module._read
    monkeypatch.setattr(module, "_read", lambda path: (status, read(path)[1]))
    monkeypatch.setattr(module.os, "stat", lambda _: status)
    first = module.digest_and_includes(str(path))
    path.write_text("// 2")
    assert (module.digest_and_includes(str(path)) != first) == (reads == 2)
