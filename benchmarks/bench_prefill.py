"""Compare prefill with torch's cuDNN and flash backends on a GPU: TFLOP/s in bursts and under load.

Each shape has 16,384 tokens of queries. FLOPs are 4 * queries * keys * heads * head_dim of unmasked pairs
(with the mean of both head dimensions if these differ). `burst` is the median of alternating calls. `steady`
is the mean of half a second of calls after a warm-up of one second. `vs` is the time of torch's best over
ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Report, arguments
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashinfer

TOKENS = 16_384
# query heads, key heads, head_dim_qk, head_dim_vo
HEADS = [(32, 8, 128, 128), (32, 32, 64, 64), (32, 32, 256, 256), (32, 32, 192, 128)]
LENGTHS = (1024, 4096, 16_384)
# name, queries and keys of each request, page_size
PAGED = [("8 x 512 of 8k", [(512, 8192)] * 8), ("8k", [(8192, 8192)]), ("64 x 16 of 4k", [(16, 4096)] * 64)]
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Call = Callable[[], object]


def pairs(requests: list[tuple[int, int]], causal: bool, window_left: int = -1) -> int:
    """Return the number of unmasked pairs of queries and keys of all requests."""
    total = sum(n * m - (n * (n - 1) // 2 if causal else 0) for n, m in requests)
    if window_left < 0:
        return total
    # A query at position p does not see the p - window_left keys before its window.
    return total - sum(max(0, p - window_left) for n, m in requests for p in range(m - n, m))


def burst(calls: dict[str, Call], rounds: int = 9) -> dict[str, float]:
    """Return median seconds of alternating calls."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if number >= 2:
                taken[name].append(start.elapsed_time(stop) * 1e-3)
    return {name: statistics.median(times) for name, times in taken.items()}


def steady(call: Call) -> tuple[float, int]:
    """Return mean seconds under load, and then the clock in MHz (0 if it cannot be read)."""
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + 0.5:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
        count += 8
    taken = (time.perf_counter() - start) / count
    try:
        return taken, torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):
        return taken, 0


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def ragged(heads: tuple[int, int, int, int], length: int, causal: bool, report: Report) -> None:
    qo_heads, kv_heads, qk, vo = heads
    batch = TOKENS // length
    q, k, v = drawn(TOKENS, qo_heads, qk), drawn(TOKENS, kv_heads, qk), drawn(TOKENS, kv_heads, vo)
    theirs = [x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
    calls: dict[str, Call] = {}
    for backend in ("auto", "fa2"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
        table = indptr([length] * batch)
        wrapper.plan(table, table, qo_heads, kv_heads, qk, head_dim_vo=vo, causal=causal, q_data_type=torch.bfloat16)
        calls["ours" if backend == "auto" else "fa2"] = lambda w=wrapper: w.run(q, k, v)
    for name, backend in PEERS.items():

        def peer(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(*theirs, is_causal=causal, enable_gqa=qo_heads != kv_heads)

        try:
            peer()
        except RuntimeError:
            continue
        calls[name] = peer
    flops = 2 * (qk + vo) * qo_heads * pairs([(length, length)] * batch, causal)
    times = burst(calls)
    rates = {name: flops / taken / 1e12 for name, taken in times.items()}
    under_load = {}
    if heads == HEADS[0]:
        loaded, clock = steady(calls["ours"])
        under_load = {"steady TFLOP/s": flops / loaded / 1e12, "steady MHz": clock}
    report.add(
        "TFLOP/s", rates.pop("ours"), rates, more=under_load,
        name="ragged", heads=f"{qo_heads}/{kv_heads}", head_dim=f"{qk}:{vo}", length=length, causal=causal,
    )  # fmt: skip


def paged(name: str, requests: list[tuple[int, int]], page_size: int, report: Report) -> None:
    qo_heads, kv_heads, qk, _ = HEADS[0]
    pages = [-(-length // page_size) for _, length in requests]
    q, cache = drawn(sum(n for n, _ in requests), qo_heads, qk), drawn(sum(pages), 2, page_size, kv_heads, qk)
    last = torch.tensor([(length - 1) % page_size + 1 for _, length in requests]).int()
    calls: dict[str, Call] = {}
    for backend in ("auto", "fa2", *(("fa3",) if page_size % 16 else ())):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
        wrapper.plan(
            indptr([n for n, _ in requests]), indptr(pages), torch.randperm(sum(pages)).int(), last, qo_heads,
            kv_heads, qk, page_size, causal=True, q_data_type=torch.bfloat16,
        )  # fmt: skip
        calls["ours" if backend == "auto" else backend] = lambda w=wrapper: w.run(q, cache)
    flops, times = 4 * qk * qo_heads * pairs(requests, True), burst(calls)
    rates = {n: flops / t / 1e12 for n, t in times.items()}
    report.add("TFLOP/s", rates.pop("ours"), rates, name="paged", requests=name, page_size=page_size)


def options(heads: tuple[int, int, int, int], length: int, causal: bool, report: Report) -> None:
    """Compare one plan with the same plan with each option: TFLOP/s of unmasked pairs."""
    qo_heads, kv_heads, dim, _ = heads
    q, k, v = drawn(TOKENS, qo_heads, dim), drawn(TOKENS, kv_heads, dim), drawn(TOKENS, kv_heads, dim)
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    scales = [torch.ones(n, device="cuda") for n in (qo_heads, kv_heads, kv_heads)]
    requests, window = [(length, length)] * (TOKENS // length), length // 4
    table, calls = indptr([length] * len(requests)), {}
    planned = {
        "plain": {}, "soft_cap": {"logits_soft_cap": 30.0}, "window": {"window_left": window}, "sigmoid": {},
        "e4m3": {"q_data_type": torch.float8_e4m3fn},
    }  # fmt: skip
    for name, given in planned.items():
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(),
            backend="fa3" if name == "sigmoid" else "auto",
            jit_args=sigmoid(dim) if name == "sigmoid" else None,
        )
        wrapper.plan(table, table, qo_heads, kv_heads, dim, causal=causal, **{"q_data_type": torch.bfloat16, **given})
        inputs = {"e4m3": eight, "sigmoid": [q, k, v, dim**-0.5, -1.0]}.get(name, [q, k, v])
        calls[name] = lambda w=wrapper, x=inputs: w.run(*x)
        if name == "plain":
            calls["lse"] = lambda w=wrapper, x=inputs: w.run(*x, return_lse=True)
        if name == "e4m3":
            calls["e4m3_scales"] = lambda w=wrapper, x=inputs: w.run(*x, *scales)
    for page_size in (16, 1):
        pages, wrapper = TOKENS // page_size, flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa3")
        cache = torch.stack([x.view(pages, page_size, kv_heads, dim) for x in (k, v)], 1)
        last = torch.full((len(requests),), page_size).int()
        wrapper.plan(
            table, indptr([length // page_size] * len(requests)), torch.randperm(pages).int(), last, qo_heads, kv_heads,
            dim, page_size, causal=causal, q_data_type=torch.bfloat16,
        )  # fmt: skip
        calls[f"page_{page_size}"] = lambda w=wrapper, x=cache: w.run(q, x)
    times, flops = burst(calls), 4 * dim * qo_heads
    seen = {name: pairs(requests, causal, window if name == "window" else -1) for name in times}
    rates = {n: flops * seen[n] / t / 1e12 for n, t in times.items()}
    report.add(
        "TFLOP/s", rates.pop("plain"), more=rates,
        name="options", heads=f"{qo_heads}/{kv_heads}", head_dim=f"{dim}", length=length, causal=causal, window=window,
    )  # fmt: skip


def sigmoid(dim: int) -> tuple:
    """Return ``jit_args`` of FlashSigmoid, a variant without softmax that takes scale and bias in ``run``."""
    parameters = [], [], ["logits_scale", "sigmoid_bias"], ["double", "double"]
    dtypes = (torch.bfloat16,) * 3
    header = "#include <flashinfer/attention/variants.h>\n"
    return "bench_sigmoid", *dtypes, torch.int32, dim, dim, *parameters, "FlashSigmoid", header


def workspace() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def main() -> None:
    given = arguments(__doc__ or "", devices=("cuda",))
    report = Report("prefill")
    for heads in HEADS:
        for length in LENGTHS:
            for causal in (True, False):
                if given.only in "ragged":
                    ragged(heads, length, causal, report)
                if given.only in "options" and heads[2] == heads[3]:
                    options(heads, length, causal, report)
    for name, requests in PAGED:
        for page_size in (16, 64, 1):
            if given.only in "paged":
                paged(name, requests, page_size, report)
    report.write(given.json)


if __name__ == "__main__":
    main()
