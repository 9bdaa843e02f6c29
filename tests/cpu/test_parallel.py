"""Exceptions of workers of torch's pool, which reach the caller unchanged."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from ..support.tree import ROOT

HERE = Path(__file__).parent


def test_exceptions_pass_the_pool(tmp_path: Path) -> None:
    program, library = tmp_path / "parallel", Path(torch.__file__).parent / "lib"
    command = [
        "g++", "-std=c++17", f"-I{ROOT / 'include'}", str(HERE / "parallel.cc"), f"-L{library}", "-ltorch_cpu",
        "-lc10", f"-Wl,-rpath,{library}", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "row: got too many, wanted fewer\nbad_alloc\n"), done.stderr
