"""Multi-head latent attention on a GPU: graph replays of the wrapper's run, one query of each request.

    python benchmarks/bench_mla.py [--backend auto] [--json FILE]

One line a batch: median time, products (2 * keys * heads * (576 + 512)) and bytes of the cache, each over the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

import flashinfer

BATCHES: list[tuple[int, int, int, int]] = [  # requests, keys, heads, page size
    (64, 4096, 128, 64), (64, 8192, 128, 64), (128, 4096, 128, 64), (64, 4096, 128, 16), (64, 4096, 128, 1),
    (64, 4096, 16, 64), (132, 4096, 16, 64), (1, 32768, 128, 64),
]  # fmt: skip
RUNS, REPLAYS = 10, 15


def planned(requests: int, keys: int, heads: int, page_size: int, backend: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A wrapper with a plan of equal lengths in pages in any order, and its inputs."""
    pages = keys // page_size
    cache = torch.randn(requests * pages, page_size, 576, device="cuda").bfloat16()
    q = torch.randn(requests, heads, 576, device="cuda").bfloat16()
    starts = torch.arange(requests + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=backend
    )
    wrapper.plan(
        starts, starts * pages, torch.randperm(requests * pages).int(), torch.full((requests,), keys).int(), heads,
        512, 64, page_size, False, 192**-0.5, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    return wrapper, (*q.split([512, 64], -1), *cache.split([512, 64], -1))


def graph_time(wrapper: Any, inputs: tuple[torch.Tensor, ...]) -> float:
    """Seconds a run."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    for requests, keys, heads, page_size in BATCHES:
        seconds = graph_time(*planned(requests, keys, heads, page_size, given.backend))
        tokens = requests * keys
        tflops, tb = 2 * tokens * heads * 1088 / seconds / 1e12, tokens * 1152 / seconds / 1e12
        print(
            f"B{requests} L{keys} H{heads} page {page_size}: {seconds * 1e6:.1f} us, {tflops:.0f} TFLOP/s, {tb:.2f} TB/s"
        )
        rows.append(dict(requests=requests, keys=keys, heads=heads, page_size=page_size, seconds=seconds))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(dict(gpu=torch.cuda.get_device_name(), backend=given.backend, rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
