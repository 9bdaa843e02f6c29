"""Variants with a LogitsMask on Hopper compile for the tiles of every element type."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..support.device_code import nvcc_or_skip
from ..support.tree import ROOT

HERE = Path(__file__).parent


def test_every_tile_compiles(tmp_path: Path) -> None:
    command = [
        nvcc_or_skip(), "-arch=compute_90a", "-std=c++17", "-Xcicc=-O1", "-ptx", f"-I{ROOT / 'include'}",
        str(HERE / "masked.cu"), "-o", str(tmp_path / "masked.ptx"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
