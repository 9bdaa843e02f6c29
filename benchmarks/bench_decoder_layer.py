"""Compare a compiled decoder layer with the same layer of torch's functions over a gathered cache.

Both are compiled with fullgraph=True, on CUDA with mode="reduce-overhead". `error` is the largest error of a
token relative to its norm, against the same layer in eager float32. A larger error than the dtype allows, or
a second graph, ends the run. `vs_torch` is torch's time over ours. Torch's layer gathers keys and values from
the pages in each step. `vs_sdpa` compares with a layer whose keys are already gathered, which a paged cache
never provides.
"""

from __future__ import annotations

import argparse
import time

import torch
from decoder_layer import LLAMA_8B, DecoderLayer, Ours, Requests, Sizes, Torchs, wanted
from timing import Report, seconds
from torch._dynamo.utils import counters

SMALL = Sizes(512, 8, 2, 128, 1024)
BATCHES = {"cuda": ([2048] * 64, [2048] * 16, [8192] * 16, [256] * 64), "cpu": ([2048] * 4, [256] * 16)}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Gathered(Torchs):
    """A layer of torch with keys and values in attention's order: a bound, not a server's layer."""

    def __init__(self, sizes: Sizes, requests: Requests, device: str, dtype: torch.dtype) -> None:
        super().__init__(sizes, requests, device, dtype)
        self.gather()

    def gather(self) -> None:
        halves = (self.cache[:, one].flatten(0, 1)[self.rows].transpose(1, 2).contiguous() for one in range(2))
        self.keys, self.values = (torch.nn.Buffer(half) for half in halves)

    def cached(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = (self.requests, slice(None), self.positions)
        self.keys[at] = k
        self.values[at] = v
        return self.keys, self.values


def same_weights(layer: DecoderLayer, other: DecoderLayer) -> None:
    with torch.no_grad():
        for name, value in other.named_parameters():
            getattr(layer, name).copy_(value)
        layer.cache.copy_(other.cache)
    if isinstance(layer, Gathered):
        layer.gather()


def measured(layer: DecoderLayer, x: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a step, and its error."""
    want = wanted(layer, x)
    torch._dynamo.reset()
    counters.clear()
    cuda = x.is_cuda
    step = torch.compile(layer, fullgraph=True, mode="reduce-overhead" if cuda else None)
    with torch.no_grad():
        for _ in range(3):
            out = step(x)
        error = float(((out.float() - want).norm(dim=-1) / want.norm(dim=-1)).max())
        graphs, skipped = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
        if graphs != 1 or skipped or not error <= TOLERANCE[x.dtype]:
            raise SystemExit(f"{type(layer).__name__}: {graphs} graphs, {skipped} not captured, error {error:.2g}")
        return (_cuda_seconds(step, x) if cuda else seconds(lambda _: step(x), 1, "cpu", 2.0)), error


def _cuda_seconds(step: DecoderLayer, x: torch.Tensor, runs: int = 200) -> float:
    """Return the median over events around single steps, which are replays.

    A layer's weights exceed the L2.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in events:
        start.record()
        step(x)
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events)
    return times[len(times) // 2] * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a layer of a small model, for a CPU")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    device = options.device
    sizes = SMALL if options.small else LLAMA_8B
    report = Report("decoder layer")
    for lengths in BATCHES[device]:
        requests = Requests(lengths, sizes, device)
        x = torch.randn(len(lengths), sizes.hidden, device=device).bfloat16()
        ours = Ours(sizes, requests, device, torch.bfloat16)
        started = time.perf_counter()
        rows = {"ours": measured(ours, x)}
        for name, kind in (("torch", Torchs), ("sdpa", Gathered)):
            other = kind(sizes, requests, device, torch.bfloat16)
            same_weights(other, ours)
            rows[name] = measured(other, x)
            del other
        report.add(
            "us", rows["ours"][0] * 1e6, {"torch": rows["torch"][0] * 1e6, "SDPA, gathered before": rows["sdpa"][0] * 1e6},
            more={"error": rows["ours"][1], "torch error": rows["torch"][1], "took s": time.perf_counter() - started},
            name="decoder layer", hidden=sizes.hidden, batch=len(lengths), keys=sum(lengths), dtype="bfloat16",
        )  # fmt: skip
    report.write(options.json)


if __name__ == "__main__":
    main()
