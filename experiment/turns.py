"""Times of one tree's kernels, in turns with other processes: turns.py NAME FOLDER PROCESSES.

FOLDER is common to the processes and empty at first; a lock in it lets one of them use the GPU at a time.
"""

import fcntl
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_mla import BATCHES, RUNS, SCALE, planned

NAME, FOLDER, PROCESSES = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
LOCK = (FOLDER / "lock").open("w")


@contextmanager
def alone() -> Iterator[None]:
    fcntl.flock(LOCK, fcntl.LOCK_EX)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        fcntl.flock(LOCK, fcntl.LOCK_UN)


def error_of(wrapper, inputs, out, shape) -> float:
    """The largest error of the first and the last request, as a part of its norm."""
    requests, keys, _, page = shape
    worst = 0.0
    for b in {0, requests - 1}:
        q = torch.cat(inputs[:2], -1)[b].double()
        pages = wrapper._planned.kv_indices[b * (keys // page) : (b + 1) * (keys // page)].long()
        kv = torch.cat([x[pages] for x in inputs[2:]], -1).reshape(-1, 576).double()
        want = torch.softmax(q @ kv.T * SCALE, -1) @ kv[:, :512]
        worst = max(worst, ((out[b].double() - want).norm(dim=-1) / want.norm(dim=-1)).max().item())
    return worst


def prepared(shape):
    wrapper, inputs = planned(*shape, "fa3")
    out = torch.empty_like(inputs[0].contiguous())
    wrapper.run(*inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            wrapper.run(*inputs, out=out)
    graph.replay()
    return graph, (wrapper, inputs, out), error_of(wrapper, inputs, out, shape)


cases = {}
for shape in BATCHES["cuda"]:
    try:
        with alone():
            cases[shape] = prepared(shape)
    except Exception as error:  # one shape that fails is no reason to lose the others
        print(NAME, shape, "FAILED", repr(error)[:300], flush=True)
(FOLDER / f"ready.{NAME}").touch()
until = time.monotonic() + 20
while len(list(FOLDER.glob("ready.*"))) < PROCESSES and time.monotonic() < until:
    time.sleep(0.02)
times = {shape: [] for shape in cases}
for _ in range(5):
    for shape, (graph, *_rest) in cases.items():
        with alone():
            graph.replay()
            for _ in range(3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times[shape].append(start.elapsed_time(end))
for shape, (_, _, error) in cases.items():
    requests, keys, heads, page = shape
    seconds, tokens = statistics.median(times[shape]) / RUNS * 1e-3, requests * keys
    print(
        f"B{requests} L{keys} H{heads} p{page} {NAME}: {seconds * 1e6:.1f} us {2 * tokens * heads * 1088 / seconds / 1e12:.0f} TFLOP/s"
        f" {tokens * 1152 / seconds / 1e12:.2f} TB/s error {error:.1e}{'' if error < 1.6e-2 else ' WRONG'}",
        flush=True,
    )
