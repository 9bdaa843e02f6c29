"""Lists that source files register values in: complete for every order in which the files are linked."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.tree import ROOT

SOURCE = Path(__file__).with_name("registered.cc")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_any_order_of_files_gives_the_whole_list(tmp_path):
    objects = []
    for number in (10, 20, 300):
        objects.append(str(tmp_path / f"{number}.o"))
        flags = [f"-DN={number}", *(["-DMAIN"] if number == 20 else []), "-std=c++17", f"-I{ROOT / 'include'}"]
        subprocess.run(["g++", *flags, "-c", str(SOURCE), "-o", objects[-1]], check=True)
    for order in itertools.permutations(objects):
        subprocess.run(["g++", *order, "-o", str(tmp_path / "program")], check=True)
        assert subprocess.run([tmp_path / "program"], capture_output=True, check=True).stdout == b"330 0 1 0\n"
