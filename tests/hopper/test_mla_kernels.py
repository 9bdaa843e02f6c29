"""What the compilers make of the Hopper kernels of multi-head latent attention: products that run by themselves, no spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashinfer.errors import ToolchainError
from flashinfer.jit.machine.toolchain import find_nvcc

HERE = Path(__file__).parent
INSTANCES = 2  # by the copy engine, and gathered


def test_ptxas_serialises_and_spills_nothing(tmp_path: Path) -> None:
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(f"no nvcc: {error}")
    command = [
        nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-Xptxas=-v", "-c",
        f"-I{HERE.parents[1] / 'include'}", str(HERE / "mla.cu"), "-o", str(tmp_path / "mla.o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert len(re.findall(r"Compiling entry function '\w*sm9010mla_kernel\w*'", said)) == INSTANCES, said
    assert not re.findall(r"C75\d\d", said), said
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) > INSTANCES and set(spills) == {("0", "0", "0")}, said
