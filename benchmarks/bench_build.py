"""Measure the build system: cold builds, warm first calls in new processes, import, an empty AOT run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from timing import Report, arguments

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
FIRST_CALL = """
import time, torch
x, w = torch.randn(8, 1024, device={device!r}).bfloat16(), torch.ones(1024, device={device!r}).bfloat16()
(x * w).sum().item()
start = time.perf_counter(); import flashinfer; imported = time.perf_counter() - start
flashinfer.jit.env.default_aot_dir = lambda: flashinfer.jit.env.Path("/nowhere")
start = time.perf_counter(); flashinfer.rmsnorm(x, w); print(imported, time.perf_counter() - start)
"""
BUILD = """
import time
from flashinfer import jit
from flashinfer.jit.modules import Matrix, matrix_specs
jit.env.default_aot_dir = lambda: jit.env.Path("/nowhere")
for spec in matrix_specs(Matrix(backends=({device!r},))):
    start = time.perf_counter(); spec.build(); print(spec.name, time.perf_counter() - start, flush=True)
"""


def run(program: str, workspace: str) -> list[list[str]]:
    environment = {**os.environ, "FLASHINFER_WORKSPACE_DIR": workspace, "PYTHONPATH": PATHS}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return [line.split() for line in done.stdout.splitlines()]


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("build system")
    with tempfile.TemporaryDirectory() as workspace:
        for name, taken in run(BUILD.format(device=options.device), workspace):
            report.add("s", float(taken), name=f"cold {name}", cpus=len(os.sched_getaffinity(0)))
        warm = [tuple(map(float, run(FIRST_CALL.format(device=options.device), workspace)[0])) for _ in range(7)]
        report.add("ms", statistics.median(first for first, _ in warm) * 1e3, name="import flashinfer after torch")
        report.add("ms", statistics.median(second for _, second in warm) * 1e3, name="warm first call in a new process")
        aot = [
            sys.executable,
            str(ROOT / "scripts" / "build_aot.py"),
            "--backend",
            options.device,
            "--out-dir",
            f"{workspace}/aot",
        ]
        environment = {**os.environ, "FLASHINFER_WORKSPACE_DIR": workspace, "PYTHONPATH": PATHS}
        for name in ("AOT run that copies", "AOT run with nothing to do"):
            start = time.perf_counter()
            subprocess.run(aot, env=environment, check=True, capture_output=True)
            report.add("s", time.perf_counter() - start, name=name)
    report.write(options.json)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
