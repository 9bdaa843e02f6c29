"""Measure multi-head latent attention with one query per request.

    python benchmarks/bench_mla.py [--device cuda] [--backend auto] [--json FILE]

Each line is a batch. On a GPU graphs are replayed: median time, FLOP/s (2 * keys * heads * (576 + 512)) and
bytes of the cache per second. On a CPU calls alternate with torch, whose cache is one tensor with all keys of
a request in order. The wall clock counts, and CPU time because other programs may run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import Report, skewed

import flashinfer

Inputs = tuple[torch.Tensor, ...]
BATCHES: dict[str, list[tuple[str, list[int], int, int]]] = {  # name, keys of requests, heads, page size
    "cuda": [
        *((f"{n} x {keys}", [keys] * n, heads, page) for n, keys, heads, page in (
            (64, 4096, 128, 64), (64, 8192, 128, 64), (128, 4096, 128, 64), (64, 4096, 128, 16), (64, 4096, 128, 1),
            (64, 4096, 16, 64), (132, 4096, 16, 64), (1, 32768, 128, 64), (20, 4096, 128, 64), (33, 4096, 128, 64),
            (40, 4096, 128, 64), (100, 4096, 128, 64),
        )),
        ("64 Pareto, longest 65000", skewed(64, 230_000, 65_000), 128, 64),
        ("64 Pareto, longest 20627", skewed(64, 262_144, 20_627), 128, 64),
    ],
    "cpu": [("4 x 4096", [4096] * 4, 16, 64), ("4 x 4096", [4096] * 4, 128, 64), ("1 x 8192", [8192], 128, 1)],
}  # fmt: skip
RUNS, REPLAYS, TURNS = 10, 15, 7
SCALE = 192**-0.5


def planned(
    keys: list[int], heads: int, page_size: int, backend: str,
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None,
) -> tuple[Any, Inputs]:  # fmt: skip
    """Return a wrapper with a plan for these lengths, with pages in random order, and its inputs."""
    lens = torch.tensor(keys, dtype=torch.int32)
    pages = torch.nn.functional.pad((lens + page_size - 1) // page_size, (1, 0)).cumsum(0).int()
    cache = torch.randn(int(pages[-1]), page_size, 576, device=device).to(kv_dtype or dtype)
    q = torch.randn(len(keys), heads, 576, device=device).to(dtype)
    starts = torch.arange(len(keys) + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), backend=backend
    )
    wrapper.plan(
        starts, pages, torch.randperm(len(cache)).int(), lens, heads, 512, 64, page_size, False, SCALE, dtype, cache.dtype,
    )  # fmt: skip
    return wrapper, (*q.split([512, 64], -1), *cache.split([512, 64], -1))


def graph_time(wrapper: Any, inputs: Inputs) -> float:
    """Return the seconds of a run."""
    out = torch.empty_like(inputs[0].contiguous())
    wrapper.run(*inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            wrapper.run(*inputs, out=out)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / RUNS * 1e-3


def torch_attention(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Compute torch's attention of ``q``, ``[requests, heads, 576]``, over ``[requests, keys, 576]``."""
    weights = torch.softmax(torch.bmm(q, cache.transpose(1, 2)).float() * SCALE, -1).to(q.dtype)
    return torch.bmm(weights, cache[..., :512])


def in_turns(*calls: Callable[[], object]) -> list[tuple[float, float]]:
    """Return the median wall time and CPU time of each call, in seconds."""
    taken: list[list[tuple[float, float]]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, times in zip(calls, taken, strict=True):
            wall, spent = time.perf_counter(), time.process_time()
            call()
            times.append((time.perf_counter() - wall, time.process_time() - spent))
    return [tuple(map(statistics.median, zip(*times[1:], strict=True))) for times in taken]  # type: ignore[misc]


def gpu_rows(report: Report, backend: str) -> None:
    for name, keys, heads, page_size in BATCHES["cuda"]:
        seconds = graph_time(*planned(keys, heads, page_size, backend))
        tokens = sum(keys)
        report.add(
            "TFLOP/s", 2 * tokens * heads * 1088 / seconds / 1e12, name=name, heads=heads, page_size=page_size,
            more={"us": seconds * 1e6, "TB/s": tokens * 1152 / seconds / 1e12},
        )  # fmt: skip


def cpu_rows(report: Report) -> None:
    types = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)]
    for name, keys, heads, page_size in BATCHES["cpu"]:
        for dtype, kv_dtype in types:
            wrapper, inputs = planned(keys, heads, page_size, "auto", "cpu", dtype, kv_dtype)
            q, cache = torch.cat(inputs[:2], -1), torch.randn(len(keys), keys[0], 576).to(dtype)
            ours, peer = in_turns(lambda: wrapper.run(*inputs), lambda: torch_attention(q, cache))  # noqa: B023
            report.add(
                "ms", ours[0] * 1e3, {"torch": peer[0] * 1e3}, more={"CPU time of torch over ours": peer[1] / ours[1]},
                name=name, heads=heads, page_size=page_size, dtype=str(dtype), kv_dtype=str(kv_dtype),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="backend on a GPU")
    parser.add_argument("--json")
    given = parser.parse_args()
    report = Report("latent attention")
    if given.device == "cuda":
        gpu_rows(report, given.backend)
    else:
        cpu_rows(report)
    report.write(given.json)


if __name__ == "__main__":
    main()
