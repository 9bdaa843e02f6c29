"""Builds of the CPU kernels with one fault: the drivers of ``tests/cpu``, which a right build passes, catch each."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.tree import ROOT

INCLUDE = ROOT / "include"
DRIVERS = ROOT / "tests" / "cpu" / "drivers"
KERNEL, PROTOCOL = "flashinfer/cpu/allreduce.h", "flashinfer/common/allreduce.h"
EXPERTS, TARGETS = "flashinfer/cpu/moe_alltoall.h", "flashinfer/common/moe_alltoall.h"
COPY = "  if (p.residual_out != p.residual_in) std::memcpy(p.residual_out, p.residual_in, p.rows * bytes);\n"
HEADERS = "  call.send_headers();\n"
LATE = "std::this_thread::sleep_for(std::chrono::milliseconds(1));"  # so that a peer reads in between
# Fault -> header, replaced texts, and the results that must differ.
FAULTS = {
    "one slot": (PROTOCOL, {"constexpr int kSlots = 2;": "constexpr int kSlots = 1;"}, "sum residual_out error"),
    "no clear": (
        KERNEL,
        {"if (word != kEmpty) __atomic_store_n(address, kEmpty, __ATOMIC_RELAXED);": ""},
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
    "headers before the rows": (
        EXPERTS,
        {
            "call.send_headers();\n  call.finish();\n}": "call.finish();\n}",
            "  if (!call.failed()) {\n    parallel_rows(most,": f"  call.send_headers();\n  {LATE}\n  {{\n    parallel_rows(most,",
        },
        "row id",
    ),
    "headers before the results": (
        EXPERTS,
        {
            "call.send_headers();\n  call.finish();\n  const float": "call.finish();\n  const float",
            "  if (!call.failed()) {\n    const auto* sent": f"  call.send_headers();\n  {LATE}\n  {{\n    const auto* sent",
        },
        "sum",
    ),
    "results of a rank are added for each expert": (TARGETS, {"  if (seen >> target & 1) return -1;\n": ""}, "sum"),
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
    driver = DRIVERS / ("moe_alltoall.cc" if header in (EXPERTS, TARGETS) else "allreduce.cc")
    build = ["g++", "-std=c++17", "-Wno-psabi", f"-I{tmp_path}", f"-I{INCLUDE}", str(driver), "-o", str(program)]
    subprocess.run(build, check=True)
    done = subprocess.run([program, str(random.randrange(1 << 32))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and any(f"{name}[" in done.stdout for name in wrong.split()), done.stdout
