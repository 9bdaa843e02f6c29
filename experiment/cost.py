"""What events cost: kernels with them over kernels without, in turns in one process. cost.py NAME...; BUILD=1: runs once."""

import os
import statistics
import sys

import torch

import flashinfer
from flashinfer import profiler
from flashinfer._profiler.buffer import read

RUNS = 10


def workspace() -> torch.Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8, device="cuda")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def mla(requests: int, keys: int, heads: int, page: int, backend: str, on: bool):
    pages, q = requests * keys // page, drawn(2, requests, heads, 576)
    cache, starts = drawn(1, pages, page, 576), torch.arange(requests + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
    wrapper.plan(
        starts, starts * (keys // page), torch.arange(pages).int(), torch.full((requests,), keys).int(), heads, 512, 64,
        page, False, 192**-0.5, torch.bfloat16, torch.bfloat16, use_profiler=on,
    )  # fmt: skip
    buffer = torch.zeros(1 << 22, dtype=torch.int64, device="cuda") if on else None
    out, inputs = drawn(3, requests, heads, 512), (*q.split([512, 64], -1), *cache.split([512, 64], -1))
    return (lambda: wrapper.run(*inputs, out=out, profiler_buffer=buffer)), out, buffer


def prefill(requests: int, keys: int, backend: str, on: bool):
    q, k, v = drawn(1, requests * keys, 32, 128), drawn(2, requests * keys, 8, 128), drawn(3, requests * keys, 8, 128)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
    buffer = torch.zeros(1 << 22, dtype=torch.int64, device="cuda") if on else None
    if buffer is not None:
        profiler.attach(wrapper, buffer)
    starts = torch.arange(requests + 1, dtype=torch.int32) * keys
    wrapper.plan(starts, starts, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    out = torch.empty_like(q)
    return (lambda: wrapper.run(q, k, v, out=out)), out, buffer


CASES = {
    "mla fa3 B64 H128": lambda on: mla(64, 4096, 128, 64, "fa3", on),
    "mla fa3 B132 H16": lambda on: mla(132, 4096, 16, 64, "fa3", on),
    "mla fa3 page 1": lambda on: mla(64, 4096, 128, 1, "fa3", on),
    "mla fa2 B64 H128": lambda on: mla(64, 4096, 128, 64, "fa2", on),
    "prefill fa3 4k": lambda on: prefill(4, 4096, "fa3", on),
}


def graph_of(call) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            call()
    return graph


def taken(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / RUNS * 1e3


for name, make in CASES.items():
    if sys.argv[1:] and not any(only in name for only in sys.argv[1:]):
        continue
    (off, out_off, _), (on, out_on, buffer) = make(False), make(True)
    if os.environ.get("BUILD"):
        off(), on(), torch.cuda.synchronize()
        print(name, "built", flush=True)
        continue
    graphs = graph_of(off), graph_of(on)
    times = [[taken(graph) for graph in graphs] for _ in range(9)]
    a, b = (statistics.median(x) for x in zip(*times[1:], strict=True))
    recording = read(buffer)
    print(
        f"events, {name}: off {a:.1f} us, on {b:.1f} us, ratio {b / a:.3f}; same bits: {torch.equal(out_off, out_on)};"
        f" records {sum(len(track.records) for track in recording.tracks)}, dropped {recording.dropped}",
        flush=True,
    )
