"""Launches on simulated GPUs: shared memory is requested whenever the driver requires it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ..support.device_code import nvcc_or_skip
from ..support.tree import ROOT

HERE = Path(__file__).parent


def built(name: str, arch: str, folder: Path) -> tuple[Path, str]:
    """Return a program with driver.h as its CUDA runtime, and the static shared memory of its kernels."""
    program = folder / name
    command = [
        nvcc_or_skip(), f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17", "-Xptxas=-v", "-cudart=none",
        f"-I{ROOT / 'include'}", str(HERE / f"{name}.cu"), str(HERE / "driver.cc"), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    uses = re.findall(r"Compiling entry function '(\w+)'.*?(Used [^\n]*)", said, re.S)
    statics = {kernel: re.search(r"(\d+) bytes smem", used) for kernel, used in uses}
    return program, "".join(f"{kernel} {found[1]}\n" for kernel, found in statics.items() if found)


def run(program: Path, statics: str, *words: object) -> str:
    done = subprocess.run([str(program), *map(str, words)], input=statics, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("arch", ["90a", "90", "80"])
def test_launcher(arch: str, tmp_path: Path) -> None:
    program, statics = built("kernel", arch, tmp_path)
    assert run(program, statics, arch) == "0 failures\n"


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return built("sampling", "80", tmp_path_factory.mktemp("sampling"))


# Compute capability, SMs, bytes of shared memory that a CTA may ask for.
@pytest.mark.parametrize("gpu", [(8, 0, 108, 166912), (8, 6, 84, 101376), (9, 0, 132, 232448), (12, 0, 188, 101376)])
def test_rows_of_every_length(sampling: tuple[Path, str], gpu: tuple[int, ...]) -> None:
    said = run(*sampling, *gpu)
    found = re.fullmatch(r"(\d+) near the limit, 0 failures, longest rows (\d+) filtered (\d+) plain\n", said)
    assert found and int(found[1]) > 0, said
