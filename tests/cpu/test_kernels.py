"""CPU kernels without torch: one program per family, against double, by several compilers and processors."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashinfer.jit.machine.target import Target, native_level

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).parent / "drivers"
LEVEL = native_level()
X86, AVX2 = LEVEL != "generic", LEVEL.startswith(("x86-64-v3", "x86-64-v4"))
# -O1, because compilers take most of the time. All other tests call optimised kernels.
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{ROOT / 'include'}"]

# Compiler and runner of each tool. The other tests cover g++ at this machine's level.
TOOLS = {
    "g++": (["g++", *(["-march=x86-64"] if X86 else [])], []),
    "clang++": (["clang++", *(["-march=x86-64-v3"] if AVX2 else [])], []),
    "aarch64": (["aarch64-linux-gnu-g++", "-static"], [shutil.which("qemu-aarch64-static") or "qemu-aarch64"]),
    "native": (["g++", *Target("cpu", (LEVEL,), True).flags()], []),
}
CASES = [
    pytest.param(path.stem, tool, marks=[] if tool in ("g++", "native") else pytest.mark.slow, id=f"{path.stem}-{tool}")
    for path in sorted(DRIVERS.glob("*.cc"))
    for tool in TOOLS
    if (path.stem == "gemm_bf16") == (tool == "native")
]


def missing(tool: str) -> list[str]:
    compiler, runner = TOOLS[tool]
    names = [name for name in (compiler[0], *runner) if shutil.which(name) is None]
    return [*names, *(["a CPU with AVX512-BF16"] if tool == "native" and not LEVEL.endswith("+avx512bf16") else [])]


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize(("driver", "tool"), CASES)
def test_kernels_against_double(driver, tool, tmp_path):
    if names := missing(tool):
        pytest.skip(f"needs {' and '.join(names)}")
    (compiler, runner), program = TOOLS[tool], tmp_path / driver
    build = [*compiler, *FLAGS, str(DRIVERS / f"{driver}.cc"), "-o", str(program)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(build)}\n{done.stderr}"
    words = [*runner, str(program), str(random.randrange(1 << 32))]
    done = subprocess.run(words, capture_output=True, text=True)
    summary = re.fullmatch(r"(\d+) checks, 0 failures\n", done.stdout)
    assert done.returncode == 0 and summary, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    assert int(summary[1]) > 1000
    if not runner:
        done = subprocess.run([*words, "fault"], capture_output=True, text=True)
        assert done.returncode == 1 and "wanted" in done.stdout, "a driver that does not detect a fault"


def test_every_family_has_a_driver():
    def kernels(path: Path) -> set[str]:
        return set(re.findall(r"#include <(flashinfer/cpu/[^>]+)>", path.read_text()))

    driven = set().union(*map(kernels, DRIVERS.glob("*.cc")))
    without = {path.name for path in (ROOT / "csrc").glob("*_cpu.cc") if not kernels(path) <= driven}
    assert not without, f"no driver in {DRIVERS} calls the kernels of {without}"
