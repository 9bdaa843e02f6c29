"""Measure the start of a process: imports, the first name, a load of a prebuilt module, the first call.

    python benchmarks/bench_start.py --rounds 9 --tree /path/of/another/checkout

Each round starts one process per tree, alternately, and each row is the median of its rounds. Torch is
imported before the clock starts. ``warm hit`` is ``build_and_load()`` of norm's module, built by an earlier
process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import Report

ROOT = Path(__file__).resolve().parents[1]
PREPARE = """
from flashinfer.jit.modules.norm import gen_norm_module
gen_norm_module("cpu").build()
"""
START = """
import sys, time, torch
x, w = torch.randn(8, 1024).bfloat16(), torch.ones(1024).bfloat16()
(x * w).sum().item()
modules, times = len(sys.modules), [time.perf_counter()]
import flashinfer
times.append(time.perf_counter()); imported = len(sys.modules) - modules
flashinfer.rmsnorm
times.append(time.perf_counter()); named = len(sys.modules) - modules
spec = flashinfer.norm.gen_norm_module("cpu")
times.append(time.perf_counter())
spec.build_and_load()
times.append(time.perf_counter())
flashinfer.rmsnorm(x, w)
times.append(time.perf_counter())
steps = [later - earlier for earlier, later in zip(times, times[1:])]
print(steps[0], steps[1], steps[3], steps[4], times[-1] - times[0], imported, named)
"""
ROWS = (
    "import flashinfer",
    "first name",
    "warm hit",
    "first call",
    "all of it",
    "modules after import",
    "modules after a name",
)


def run(program: str, tree: Path, workspace: Path) -> str:
    """Run a program on a tree's package and return its output."""
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "FLASHINFER_WORKSPACE_DIR": str(workspace), "PYTHONPATH": paths}
    environment["FLASHINFER_AOT_DIR"] = str(workspace / "none")
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, measured alternately")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    trees = [ROOT, *(tree.resolve() for tree in options.tree)]
    found: dict[Path, list[list[float]]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        workspaces = {tree: Path(folder, str(number)) for number, tree in enumerate(trees)}
        for tree in trees:
            run(PREPARE, tree, workspaces[tree])
            run(START, tree, workspaces[tree])  # bytecode is written, files are in memory
        for _ in range(options.rounds):
            for tree in trees:
                found[tree].append([float(number) for number in run(START, tree, workspaces[tree]).split()])
    report = Report("build system")
    medians = {tree: [statistics.median(column) for column in zip(*rows, strict=True)] for tree, rows in found.items()}
    for number, name in enumerate(ROWS):
        unit, factor = ("modules", 1.0) if name.startswith("modules") else ("ms", 1e3)
        ours, *others = (medians[tree][number] * factor for tree in trees)
        report.add(unit, ours, {tree.name: other for tree, other in zip(trees[1:], others, strict=True)}, name=name)
    report.write(options.json)


if __name__ == "__main__":
    main()
