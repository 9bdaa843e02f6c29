"""Compare two checkouts: run the same benchmarks with either package, alternately, row by row.

    git worktree add ../before COMMIT
    python benchmarks/compare_trees.py ../before . bench_regression.py --rounds 3

A benchmark is the older checkout's file, or the newer one's if the older has none of that name.
Each run has its own process. A row's time is the minimum over rounds, because other processes only add time.
Rows slower by more than `--allow` are marked, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Times = dict[str, float]
TIMES = ("s", "ms", "us")  # units of times; every other unit is a rate


def times_of(rows: list[dict[str, Any]]) -> Times:
    """Return one number per row, smaller is faster: a time as it is, a rate as its inverse."""
    return {f"{row['shape']} {row['unit']}": row["ours"] ** (1 if row["unit"] in TIMES else -1) for row in rows}


def with_package_of(tree: Path) -> dict[str, str]:
    """Return the environment in which ``import flashinfer`` finds a tree's package, after checking it."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", "import flashinfer; print(flashinfer.__file__)"]
    run = subprocess.run(command, env=environment, cwd=tree / "benchmarks", capture_output=True, text=True, check=True)
    found = run.stdout.strip()
    if not Path(found).is_relative_to(tree):
        raise SystemExit(f"flashinfer: got the package at {found}, wanted that of {tree}")
    return environment


def measure(tree: Path, benchmark: Path, options: list[str]) -> Times:
    """Run a benchmark once with the package of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, str(benchmark), "--json", str(rows), *options]
        run = subprocess.run(command, env=with_package_of(tree), stdout=subprocess.DEVNULL)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} with the package of {tree} ended with {run.returncode}")
        return times_of(json.loads(rows.read_text())["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="older checkout")
    parser.add_argument("after", type=Path)
    parser.add_argument("benchmarks", nargs="+", metavar="FILE", help="names in benchmarks/")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--allow", type=float, default=0.03, help="share by which a row may be slower (default 0.03)")
    parser.add_argument("--only", default="", help="passed to the benchmarks: rows whose name contains this")
    given = parser.parse_args()
    trees = [given.before.resolve(), given.after.resolve()]
    options = ["--only", given.only] if given.only else []
    slower = 0
    for file in given.benchmarks:
        benchmark = next(path for tree in trees if (path := tree / "benchmarks" / file).exists())
        least: list[Times] = [{}, {}]
        for number in range(given.rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                for row, time in measure(trees[side], benchmark, options).items():
                    least[side][row] = min(time, least[side].get(row, time))
        for row, before in least[0].items():
            if row not in least[1]:
                print(f"{file}: {row}: only before")
                continue
            ratio = least[1][row] / before
            is_slower = ratio > 1 + given.allow
            slower += is_slower
            print(f"{file}: {row}={least[1][row]:.4g} before={before:.4g} ratio={ratio:.3f}{' SLOWER' * is_slower}")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
