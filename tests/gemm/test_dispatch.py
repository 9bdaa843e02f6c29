"""The table of kernels for one arch, by which grouped GEMM selects a launcher. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer._gemm.operators import grouped_gemm

from ..support.tree import ROOT

SOURCE = Path(__file__).with_name("dispatch.cc")
REFUSED = "ValueError: grouped_gemm: backend: got 'sm{}', which cannot serve: {}"
UNKNOWN = REFUSED.format(120, "this module has no kernels for it")
EIGHT_BITS = REFUSED.format(100, "only float8_e4m3fn is read")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_first_kernels_that_serve_a_call_run(tmp_path):
    """The portable kernels are the last choice. A required arch without kernels for the call gives its reason."""
    program = tmp_path / "dispatch"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", "-x", "c++"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert dict(line.split(": ", 1) for line in printed.splitlines()) == {
        "float32 0": "80, 0 with a gate",
        "float32 90": REFUSED.format(90, "no kernel reads float32"),
        "float32 100": EIGHT_BITS,
        "float32 120": UNKNOWN,
        "bfloat16 0": "90, 1 with a gate",
        "bfloat16 90": "90, 1 with a gate",
        "bfloat16 100": EIGHT_BITS,
        "bfloat16 120": UNKNOWN,
        "float8_e4m3fn 0": "100, 1 with a gate",
        "float8_e4m3fn 90": "90, 1 with a gate",
        "float8_e4m3fn 100": "100, 1 with a gate",
        "float8_e4m3fn 120": UNKNOWN,
    }


@pytest.mark.parametrize("arch", [-1, 1000, 1 << 32])
def test_numbers_that_are_no_arch(arch, device):
    x, b, out = (torch.ones(shape, device=device) for shape in ((4, 8), (1, 8, 8), (4, 8)))
    with pytest.raises(ValueError, match="^grouped_gemm: arch: got another number, wanted 0 or an arch such as 90"):
        grouped_gemm(out, x, b, *[None] * 7, 0, 0, 0, arch=arch)
    assert bool((out == 1).all()), "nothing is written"
