"""Packing as e4m3: an instruction if the GPU has it, an error if not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ..support.device_code import nvcc_or_skip
from ..support.tree import ROOT

HERE = Path(__file__).parent


@pytest.mark.parametrize(("arch", "packs"), [("80", False), ("86", False), ("89", True), ("90a", True)])
def test_older_gpus_stop(arch: str, packs: bool, tmp_path: Path) -> None:
    text = tmp_path / "e4m3.ptx"
    command = [
        nvcc_or_skip(), f"-arch=compute_{arch}", "-std=c++17", "-ptx", f"-I{ROOT / 'include'}",
        str(HERE / "e4m3.cu"), "-o", str(text),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body = text.read_text().split(".entry")[1]
    assert ("e4m3x2" in body, "trap;" in body) == (packs, not packs)
