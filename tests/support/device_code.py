"""Output of the CUDA compilers: object files, messages of ptxas, and instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashinfer.errors import ToolchainError
from flashinfer.jit.machine.toolchain import find_nvcc

from .tree import ROOT


def nvcc_or_skip() -> str:
    try:
        return find_nvcc()
    except ToolchainError as error:
        pytest.skip(f"no nvcc: {error}")


def compiled_for_hopper(source: Path, folder: Path) -> tuple[Path, str]:
    return compiled_for("90a", source, folder)


def compiled_for(arch: str, source: Path, folder: Path) -> tuple[Path, str]:
    """Return the object file of a source in ``folder``, and ptxas's messages."""
    place = folder / f"{source.stem}.o"
    command = [
        nvcc_or_skip(), f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17", "-O3", "-Xptxas=-v", "-c",
        f"-I{ROOT / 'include'}", str(source), "-o", str(place),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place, done.stdout + done.stderr


def assert_clean(messages: str, kernel: str, instances: int) -> None:
    """Check that ptxas compiled so many kernels of this name without spills and without serialised wgmma."""
    assert len(re.findall(rf"Compiling entry function '\w*{kernel}\w*'", messages)) == instances, messages
    assert not re.search(r"C75\d\d", messages), messages
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    assert spills and set(spills) == {("0", "0", "0")}, messages


def sass_or_skip(place: Path) -> str:
    """Return the instructions of an object file, by cuobjdump on the path or by triton's."""
    program = shutil.which("cuobjdump")
    try:
        import triton

        brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        program = program or (str(brought) if brought.exists() else None)
    except ImportError:
        pass
    if program is None:
        pytest.skip("no cuobjdump, which triton brings")
    return subprocess.run([program, "--dump-sass", str(place)], capture_output=True, text=True, check=True).stdout
