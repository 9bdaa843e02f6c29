"""Compare ways to compute a batch's attention: a loop, heads, one block-diagonal mask, the ragged wrapper.

Each request has queries over as many keys, causal. `eager` is the time of a Python call. `graph` is the same
captured: a CUDA graph, or on a CPU a graph of torch.compile. On a CPU ways alternate and the fastest call of
each counts. `plan` is the ragged wrapper's plan(), once for each set of lengths for all layers. `vs_loop` is
the loop's time over a way's, in the same mode.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from timing import Report, arguments, seconds

import flashinfer

# requests, length of each (the mean where they vary), query heads, key heads, head_dim
CASES = {
    "cpu": [(4, 256, 8, 2, 64), (16, 64, 8, 2, 64), (64, 8, 8, 2, 64)],
    "cuda": [(8, 2048, 32, 8, 128), (32, 256, 32, 8, 128), (128, 32, 32, 8, 128)],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
Way = Callable[[], torch.Tensor]


def eager(calls: dict[str, Way], device: str) -> dict[str, float]:
    """Return seconds of a call of each from Python, including the device's work."""
    if device == "cpu":
        return in_turns(calls)
    return {name: wall(call) for name, call in calls.items()}


def graphed(calls: dict[str, Way], device: str) -> dict[str, float]:
    """Return seconds of a call of each in graphs."""
    if device != "cpu":
        return {name: seconds(lambda _, call=call: call(), 1, device) for name, call in calls.items()}  # type: ignore[misc]
    torch._dynamo.reset()
    return in_turns({name: torch.compile(call, fullgraph=True) for name, call in calls.items()})


def in_turns(calls: dict[str, Way], budget: float = 8.0) -> dict[str, float]:
    """Return the fastest time of each, because other processes only add time."""
    for call in calls.values():
        call()
    best, end = dict.fromkeys(calls, float("inf")), time.perf_counter() + budget
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def wall(call: Way) -> float:
    """Return the median of five synchronised runs."""
    taken: list[float] = []
    for _ in range(60):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / 5)
    return statistics.median(taken[10:])


def ways(
    lens: list[int], heads: int, kv_heads: int, dim: int, device: str
) -> tuple[dict[str, Way], Callable[[], None]]:
    """Return attention of all requests by name, ``[sum(lens), heads, dim]``, and the ragged plan."""
    batch, dtype, total = len(lens), DTYPES[device], sum(lens)
    q, k, v = (torch.randn(total, n, dim, device=device).to(dtype) for n in (heads, kv_heads, kv_heads))
    out, ends = torch.empty_like(q), torch.tensor(lens).cumsum(0)
    indptr = torch.nn.functional.pad(ends, (1, 0)).int()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device))

    def plan() -> None:
        ragged.plan(indptr, indptr, heads, kv_heads, dim, causal=True, q_data_type=dtype)

    def loop() -> torch.Tensor:
        parts = zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
        return torch.cat([flashinfer.single_prefill_with_kv_cache(*part, causal=True) for part in parts])

    found: dict[str, Way] = {"loop": loop, "ragged": lambda: ragged.run(q, k, v, out=out)}  # type: ignore[dict-item]
    if min(lens) == max(lens):

        def as_heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(batch, lens[0], -1, dim).transpose(0, 1).reshape(lens[0], -1, dim)

        def by_heads() -> torch.Tensor:
            y = flashinfer.single_prefill_with_kv_cache(as_heads(q), as_heads(k), as_heads(v), causal=True)
            return y.view(lens[0], batch, heads, dim).transpose(0, 1).reshape(total, heads, dim)  # type: ignore[union-attr]

        folded = [as_heads(x) for x in (q, k, v)]
        found["heads"] = by_heads
        found["heads, laid out so"] = lambda: flashinfer.single_prefill_with_kv_cache(*folded, causal=True)  # type: ignore[assignment,return-value]
    request = torch.arange(batch).repeat_interleave(torch.tensor(lens))
    position = torch.arange(total)
    seen = (request[:, None] == request) & (position <= position[:, None])
    if total * total <= 1 << 26:
        bits = flashinfer.packbits(seen.flatten().to(device), bitorder="little")
        found["block-diagonal"] = lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, packed_custom_mask=bits)  # type: ignore[assignment,return-value]
    return found, plan


def main() -> None:
    options = arguments(__doc__ or "")
    device, report = options.device, Report("batching")
    for batch, length, heads, kv_heads, dim in CASES[device]:
        rng = random.Random(batch)
        varying = [max(1, round(length * rng.uniform(0.1, 1.9))) for _ in range(batch)]
        for lengths, lens in (("fixed", [length] * batch), ("varying", varying)):
            calls, plan = ways(lens, heads, kv_heads, dim, device)
            plan()
            want = calls["loop"]()
            for name in calls.keys() - {"heads, laid out so"}:
                torch.testing.assert_close(calls[name](), want, rtol=2e-2, atol=2e-2)
            chosen = {name: call for name, call in calls.items() if options.only in name}
            for mode, measure in (("eager", eager), ("graph", graphed)):
                found = measure(chosen, device)
                for name, taken in found.items():
                    loop = {"loop": found["loop"] * 1e6} if "loop" in found and name != "loop" else {}
                    report.add(
                        "us", taken * 1e6, loop, name=name, lengths=lengths, batch=batch, length=length,
                        heads=f"{heads}/{kv_heads}", head_dim=dim, mode=mode,
                    )  # fmt: skip
            if options.only in "plan":
                report.add("us", plan_us(plan, device), name="plan", lengths=lengths, batch=batch, length=length)
    report.write(options.json)


def plan_us(plan: Callable[[], None], device: str) -> float:
    """Return microseconds of a plan with an idle device."""
    taken = []
    for _ in range(100):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


if __name__ == "__main__":
    main()
