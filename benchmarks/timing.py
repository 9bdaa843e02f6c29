"""Timing: medians of many runs over several input sets, so that no cache holds the next inputs."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[int], object]  # runs the function on input set number i


def seconds(call: Call, sets: int, device: str, budget: float = 0.4) -> float:
    """Return the median time of one call.

    CUDA: replays of a graph over all sets, timed by events. CPU: wall clock.
    """
    return _cuda_seconds(call, sets, budget) if device == "cuda" else _cpu_seconds(call, sets, budget)


def _cpu_seconds(call: Call, sets: int, budget: float) -> float:
    for number in range(sets):
        call(number)
    taken: list[float] = []
    end = time.perf_counter() + budget
    while len(taken) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(taken) % sets)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _cuda_seconds(call: Call, sets: int, budget: float) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(sets):
            call(number)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 12 // sets)
    with torch.cuda.graph(graph, stream=stream):
        for number in range(sets * repeats):
            call(number % sets)
    graph.replay()
    torch.cuda.synchronize()
    taken: list[float] = []
    end = time.perf_counter() + budget
    while len(taken) < 10 or time.perf_counter() < end:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) * 1e-3 / (sets * repeats))
    return statistics.median(taken)


def host_seconds(call: Callable[[], object], device: str, count: int = 40) -> float:
    """Return the median host time of a call. On CUDA launches queue up and nothing waits for the GPU.

    Rounds are short, because other processes interrupt a long one.
    """
    samples = []
    for _ in range(101):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        samples.append((time.perf_counter() - start) / count)
    return statistics.median(samples)


def sets_for(total_bytes: int, device: str) -> int:
    """Return input sets that together exceed the caches."""
    cache = 4 * 60e6 if device == "cuda" else 0
    return max(2, min(24, int(cache / max(total_bytes, 1)) + 1))


class Report:
    """Collect the rows of a benchmark, print each at once, and write them as JSON.

    A row has its ``shape``, ours and each peer in one ``unit``, and optionally the share of the floor that
    ours reached: bytes over the copy rate, or FLOPs over the peak. ``more`` has further numbers of ours.
    ``benchmarks/results.py`` writes RESULTS.md from such files.

    Args:
        family: the table of RESULTS.md for the rows.
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        unit: str,
        ours: float,
        peers: dict[str, float] | None = None,
        of_floor: float | None = None,
        more: dict[str, float] | None = None,
        **shape: Any,
    ) -> None:
        """Add one row: ``ours`` and ``peers`` in ``unit``, for a problem described by ``shape``."""
        text = " ".join(str(value) if key == "name" else f"{key}={value}" for key, value in shape.items())
        row = {
            "shape": text,
            "unit": unit,
            "ours": ours,
            "peers": peers or {},
            "of_floor": of_floor,
            "more": more or {},
        }
        self.rows.append(row)
        numbers = {"ours": ours, **row["peers"], "of_floor": of_floor, **row["more"]}
        print(text, unit, *(f"{key}={value:.4g}" for key, value in numbers.items() if value is not None), flush=True)

    def write(self, path: str | None) -> None:
        """Write the rows with device, date and commit to ``path``."""
        if path is None:
            return
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "benchmark": Path(sys.argv[0]).name,
            "family": self.family,
            "device": torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"CPU, {torch.get_num_threads()} threads",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit,
            "torch": torch.__version__,
        }
        Path(path).write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")


def skewed(requests: int, total: int, longest: int) -> list[int]:
    """Return lengths of a Pareto distribution with exponent 1, with this maximum and sum."""
    shares = [1 / (rank + 1) for rank in range(1, requests)]
    return [longest, *(max(1, int(share / sum(shares) * (total - longest))) for share in shares)]


def arguments(description: str, devices: Sequence[str] = ("cpu", "cuda")) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=devices, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    return parser.parse_args()
