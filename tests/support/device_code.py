"""Output of the CUDA compilers: object files, messages of ptxas, and instructions."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
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


def device_archs(library: Path) -> list[str]:
    """Return the archs that a library has machine code for, one for each source with kernels: ``"9.0a"``.

    The driver's containers of code stand in the file as a header (magic number, sizes), then entries. An entry has its
    kind (2: machine code), the sizes of its header and its code, the arch's number, and flags of its suffix.
    """
    return list(_archs_of(library.read_bytes()))


def _archs_of(data: bytes) -> Iterator[str]:
    magic, at = struct.pack("<I", 0xBA55ED50), 0
    while (at := data.find(magic, at)) >= 0:
        _, _, header_size, size = struct.unpack_from("<IHHQ", data, at)
        at, end = at + header_size, at + header_size + size
        while at < end:
            kind, _, header_size, size = struct.unpack_from("<HHIQ", data, at)
            (number,), (flags,) = struct.unpack_from("<I", data, at + 28), struct.unpack_from("<Q", data, at + 40)
            if kind == 2:
                yield f"{number // 10}.{number % 10}{'a' if flags >> 20 & 1 else 'f' if flags >> 21 & 1 else ''}"
            at += header_size + size
