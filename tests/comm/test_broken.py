"""Builds of the CPU kernel with one fault: the driver of ``tests/cpu``, which a right build passes, catches each."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.tree import ROOT

INCLUDE = ROOT / "include"
DRIVER = ROOT / "tests" / "cpu" / "drivers" / "allreduce.cc"
KERNEL, PROTOCOL = "flashinfer/cpu/allreduce.h", "flashinfer/common/allreduce.h"
COPY = "  if (p.residual_out != p.residual_in) std::memcpy(p.residual_out, p.residual_in, p.rows * bytes);\n"
HEADERS = "  call.send_headers();\n"
# Fault -> header, replaced texts, and the results that must differ.
FAULTS = {
    "one slot": (PROTOCOL, {"constexpr int kSlots = 2;": "constexpr int kSlots = 1;"}, "sum residual_out error"),
    "no clear": (
        KERNEL,
        {"if (word != kEmpty) __atomic_store_n(place, kEmpty, __ATOMIC_RELAXED);": ""},
        "sum residual_out error",
    ),
    "residual written before the input is read": (
        KERNEL,
        {
            COPY: "",
            f"{HEADERS}  parallel_rows(p.rows, bytes * p.": f"{COPY}{HEADERS}  parallel_rows(p.rows, bytes * p.",
        },
        "residual_out",
    ),
    "sums in another order on each rank": (
        KERNEL,
        {
            "for (int sender = 0; sender < group.ranks; ++sender) {": "for (int k = 0; k < group.ranks; ++k) {"
            " const int sender = (group.rank + k) % group.ranks;",
            "sender == 0 ? x :": "k == 0 ? x :",
        },
        "sum residual_out",
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_build_is_caught(fault: str, tmp_path: Path) -> None:
    header, replaced, wrong = FAULTS[fault]
    text = (INCLUDE / header).read_text()
    for old, new in replaced.items():
        assert text.count(old) == 1, f"{header} has no such text: {old}"
        text = text.replace(old, new)
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text(text)
    program = tmp_path / "driver"
    build = ["g++", "-std=c++17", "-Wno-psabi", f"-I{tmp_path}", f"-I{INCLUDE}", str(DRIVER), "-o", str(program)]
    subprocess.run(build, check=True)
    done = subprocess.run([program, str(random.randrange(1 << 32))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and any(f"{name}[" in done.stdout for name in wrong.split()), done.stdout
