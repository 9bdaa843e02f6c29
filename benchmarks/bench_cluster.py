"""Measure build_aot.py --cluster on this machine with one and two workers, one compiler each.

With ``--sleep SECONDS`` compilers only sleep. This measures the scheduling of modules on a busy machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cluster import FAKE, Cluster, environment  # noqa: E402


def build(workers: int, families: str, sleep: float) -> tuple[float, int]:
    """Return the seconds of a client with running workers, and the number of modules."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            for _ in range(workers):
                cluster.worker(seconds=sleep, compiles=FAKE) if sleep else cluster.worker()
            time.sleep(6)
            arguments = [
                "--backend",
                "cpu",
                "--families",
                families,
                "--cluster",
                cluster.address,
                "--out-dir",
                f"{folder}/out",
            ]
            command = [sys.executable, str(ROOT / "scripts" / "build_aot.py"), *arguments]
            began = time.perf_counter()
            subprocess.run(
                command, check=True, capture_output=True, env=environment(FLASHINFER_WORKSPACE_DIR=f"{folder}/client")
            )
            return time.perf_counter() - began, len(list(Path(folder, "out").glob("*/*.so")))
        finally:
            cluster.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="norm,activation,page,rope,cascade,quantization,sampling,norm_backward")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="SECONDS")
    options: Any = parser.parse_args()
    one, modules = build(1, options.families, options.sleep)
    two, _ = build(2, options.families, options.sleep)
    what = f"compilers that wait for {options.sleep} s" if options.sleep else "real compilers"
    print(f"{modules} modules, {what}: one worker {one:.1f} s, two workers {two:.1f} s: {one / two:.2f}x as fast")


if __name__ == "__main__":
    main()
