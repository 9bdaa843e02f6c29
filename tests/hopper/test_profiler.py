"""Compiled code of kernels with and without events. Disabled events must leave no instruction.

The test removes the lines of events from a copy of the headers, and compiles both.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.device_code import nvcc_or_skip, sass_or_skip

pytestmark = pytest.mark.slow  # compiles kernels
HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
ARCHS = ("80", "90a")
# Statements, members, arguments and parameters of events, in this order. No "profiler" or "Track" remains.
EVENTS = [
    (r"^\s*(if \([^()]*\) )?(profiler|track)\.\w+\([^;]*\);\n", ""),
    (r"^#include <flashinfer/cuda/profiler\.cuh>\n", ""),
    (r"^\s*(Profiler<[^;\n]*>|Track)&? profiler(\(params\))?;\n", ""),
    (r"^\s*using Track = [^;]*;\n", ""),
    (r"^\s*using Base::profiler;\n", ""),
    (r"with_tracks\((\w+), [^()]*\)", r"\1"),
    (r",\s*(typename )?Track(& \w+)?", ""),
    (r",\s*profiler(\(track\))?(?=[,)} ])", ""),
    (r",\s*Event kThen = [^>]*(?=>)", ""),
    (r",\s*Event::\w+(?=>\()", ""),
    (r",\s*bool kProfiler(?=>)", ""),
    (r",\s*P::kProfiler(?=>)", ""),
]


def without_events(text: str) -> str:
    for pattern, by in EVENTS:
        text = re.sub(pattern, by, text, flags=re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def nvcc() -> str:
    return nvcc_or_skip()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the headers without events."""
    copy = tmp_path_factory.mktemp("plain") / "include"
    shutil.copytree(INCLUDE, copy)
    changed = 0
    for folder in ("mla", "attention"):
        for path in (copy / "flashinfer" / "cuda" / folder).rglob("*.cuh"):
            before = path.read_text()
            path.write_text(after := without_events(before))
            changed += after != before
            left = [line for line in after.splitlines() if re.search(r"rofiler|\btrack\b|\bTrack\b", line)]
            assert not left, f"{path.name}: an unknown line of events: {left}"
    assert changed > 8
    (copy / "flashinfer" / "cuda" / "profiler.cuh").unlink()
    return copy


def compiled(nvcc: str, arch: str, include: Path, cubin: Path, *defines: str) -> str:
    """Compile the kernels of an arch to ``cubin``, and return ptxas' output."""
    command = [
        nvcc, f"-arch=sm_{arch}", "-cubin", "-std=c++17", "-O3", "-Xptxas=-v", f"-I{include}", f"-DARCH={int(arch[:2])}",
        *defines, str(HERE / "profiler.cu"), "-o", str(cubin),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def instructions(cubin: Path) -> dict[str, list[str]]:
    """Return the instructions of each kernel by its name, in the order of the file."""
    found = re.findall(r"Function : (\w+)\n(.*?)(?=Function :|\Z)", sass_or_skip(cubin), re.DOTALL)
    kernels = {name: re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?;)", body) for name, body in found}
    assert kernels and all(len(body) > 100 for body in kernels.values())
    return kernels


def registers(said: str) -> list[str]:
    return re.findall(r"Used \d+ registers, .*", said)


@pytest.mark.parametrize("arch", ARCHS)
def test_events_that_are_off_cost_no_instruction_and_no_register(arch, nvcc, plain, tmp_path):
    off, bare, on = (tmp_path / f"{name}.cubin" for name in ("off", "bare", "on"))
    assert registers(compiled(nvcc, arch, INCLUDE, off)) == registers(compiled(nvcc, arch, plain, bare))
    mine, others = instructions(off), instructions(bare)
    assert list(mine.values()) == list(others.values())
    # Enabled events read a clock, and products stay asynchronous.
    on_said = compiled(nvcc, arch, INCLUDE, on, "-DEVENTS")
    assert not re.findall(r"C75\d\d", on_said), on_said
    kernels = [body for name, body in instructions(on).items() if "merge" not in name]
    assert all(sum("CLOCK" in one for one in body) > 8 for body in kernels)
    assert not any("CLOCK" in one for body in mine.values() for one in body)
    spilled = [int(stored) for stored in re.findall(r"(\d+) bytes spill stores", on_said)]
    assert spilled and max(spilled) <= 64, on_said


def test_lines_of_events_are_compiled_with_and_without_events(nvcc, tmp_path):
    """An undefined name is an error with and without events, so both texts are compiled."""
    copy = tmp_path / "include"
    shutil.copytree(INCLUDE, copy)
    header = copy / "flashinfer" / "cuda" / "mla" / "sm80.cuh"
    line = "  profiler.begin(Event::kItem);\n"
    text = header.read_text()
    assert text.count(line) == 1
    header.write_text(text.replace(line, "  profiler.begin(entry);\n"))
    for defines in ([], ["-DEVENTS"]):
        command = [
            nvcc, "-std=c++17", "-ptx", "-arch=compute_80", f"-I{copy}", "-DARCH=80", *defines, str(HERE / "profiler.cu"),
            "-o", str(tmp_path / "out.ptx"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and 'identifier "entry" is undefined' in done.stderr, done.stderr
