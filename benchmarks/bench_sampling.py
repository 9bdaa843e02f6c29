"""Compare sampling with torch: graph replays beyond the L2 on CUDA, calls of one thread on a CPU.

    python benchmarks/bench_sampling.py [--device cuda] [--vocab 128256] [--json FILE]

Each line is a function and a batch: median time, time of torch's nearest function, and the floor by bytes.
Rows are flat (softmax of normal numbers) or peaked (of five times those).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import Report

from flashinfer import sampling

COPY_TB_PER_S = 4.27  # measured on an H200
Call = Callable[[torch.Tensor], Any]


def calls(device: str) -> dict[str, tuple[str, int, Call, Call]]:
    """Return by name: the input, passes over memory, ours and torch's nearest function."""
    word = torch.ones(1, dtype=torch.int64, device=device)
    random = dict(seed=word, offset=word)
    s = sampling
    return {
        "sampling_from_probs": ("probs", 1, lambda x: s.sampling_from_probs(x, **random), lambda x: x.multinomial(1)),
        "sampling_from_logits": (
            "logits", 1, lambda x: s.sampling_from_logits(x, **random), lambda x: x.softmax(-1).multinomial(1)
        ),
        "min_p 0.1": ("probs", 1, lambda x: s.min_p_sampling_from_probs(x, 0.1, **random), lambda x: x.multinomial(1)),
        "top_k 50": ("probs", 1, lambda x: s.top_k_sampling_from_probs(x, 50, **random), lambda x: x.topk(50)),
        "top_k 1000": ("probs", 1, lambda x: s.top_k_sampling_from_probs(x, 1000, **random), lambda x: x.topk(1000)),
        "top_p 0.9": ("probs", 1, lambda x: s.top_p_sampling_from_probs(x, 0.9, **random), lambda x: x.multinomial(1)),
        "joint 50 0.9": (
            "probs", 1,
            lambda x: s.top_k_top_p_sampling_from_probs(x, 50, 0.9, filter_apply_order="joint", **random),
            lambda x: x.topk(50),
        ),
        "top_k_top_p logits": (
            "logits", 1, lambda x: s.top_k_top_p_sampling_from_logits(x, 50, 0.9, **random), lambda x: x.topk(50)
        ),
        "softmax": ("logits", 2, lambda x: s.softmax(x), lambda x: x.softmax(-1)),
        "top_k_mask_logits 50": ("logits", 2, lambda x: s.top_k_mask_logits(x, 50), lambda x: x.topk(50)),
        "top_k_renorm 50": ("probs", 2, lambda x: s.top_k_renorm_probs(x, 50), lambda x: x.topk(50)),
        "top_p_renorm 0.9": ("probs", 2, lambda x: s.top_p_renorm_probs(x, 0.9), lambda x: x.softmax(-1)),
        "top_k(2048)": ("logits", 1, lambda x: s.top_k(x, 2048), lambda x: x.topk(2048)),
    }  # fmt: skip


def graph_time(call: Call, inputs: list[torch.Tensor]) -> float:
    """Return microseconds of a call, with all inputs in one graph."""
    for x in inputs[:2]:
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(x)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return statistics.median(times)


def host_time(call: Call, inputs: list[torch.Tensor]) -> float:
    """Return the minimum microseconds of the thread's CPU time within a third of a second."""
    times = []
    call(inputs[0])
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        for x in inputs:
            start = time.thread_time_ns()
            call(x)
            times.append((time.thread_time_ns() - start) / 1e3)
    return min(times)


def measure(report: Report, device: str, vocab: int, batches: list[int], dtype: torch.dtype, torch_too: bool) -> None:
    for batch in batches:
        size = batch * vocab * dtype.itemsize
        copies = max(2, min(64, 200_000_000 // size + 1)) if device == "cuda" else 2
        for scale in (1.0, 5.0):
            logits = [torch.randn(batch, vocab, device=device).mul_(scale).to(dtype) for _ in range(copies)]
            probs = [x.float().softmax(-1).to(dtype) for x in logits]
            for name, (reads, passes, ours, theirs) in calls(device).items():
                inputs = logits if reads == "logits" else probs
                timed = graph_time if device == "cuda" else host_time
                taken = timed(ours, inputs)
                peers = {}
                if torch_too:
                    with contextlib.suppress(RuntimeError):  # some functions of torch cannot be captured
                        peers["torch"] = timed(theirs, inputs)
                floor = passes * size / COPY_TB_PER_S / 1e6
                spread = "flat" if scale == 1 else "peaked"
                report.add(
                    "us", taken, peers, of_floor=floor / taken if device == "cuda" else None, name=name, batch=batch, vocab=vocab, rows=spread,
                    dtype=str(dtype).removeprefix("torch."),
                )  # fmt: skip
            del logits, probs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batches", default="1,64,512")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(1)
    if args.device == "cpu":
        torch.set_num_threads(1)
    batches = [1] if args.device == "cpu" else [int(batch) for batch in args.batches.split(",")]
    report = Report("sampling")
    measure(report, args.device, args.vocab, batches, getattr(torch, args.dtype), not args.no_torch)
    report.write(args.json)


if __name__ == "__main__":
    main()
