"""Compare host time of a call after the first with torch's, before and after the import of torch._dynamo.

Problems are as small as possible, because only host time matters. On CUDA nothing waits for the kernel. On a
CPU the kernel is part of the time, with one thread.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Report, arguments, host_seconds

import flashinfer

Calls = dict[str, Callable[[], object]]
HEAD_DIM, PAGE_SIZE, KV_LEN = 64, 16, 4
SECONDS = 15  # before torch._dynamo is imported, and again after


def memory_bound(device: str) -> Calls:
    rows, width = (4, 1024) if device == "cuda" else (1, 64)
    x = torch.randn(rows, width, device=device).bfloat16()
    w, out = torch.ones(width, device=device).bfloat16(), torch.empty_like(x)
    gate = torch.randn(rows, 2 * width, device=device).bfloat16()
    return {
        "F.rms_norm": lambda: F.rms_norm(x, (width,), w, 1e-6),
        "rmsnorm": lambda: flashinfer.rmsnorm(x, w),
        "rmsnorm out=": lambda: flashinfer.rmsnorm(x, w, out=out),
        "fused_add_rmsnorm": lambda: flashinfer.fused_add_rmsnorm(out, x, w),
        "silu_and_mul out=": lambda: flashinfer.silu_and_mul(gate, out=out),
        "torch.add out=": lambda: torch.add(x, x, out=out),
        "torch.empty": lambda: torch.empty((rows, width), dtype=torch.bfloat16, device=device),
    }


def attention(device: str) -> Calls:
    """One request, one head and a few keys. Nothing is split, so CUDA launches one kernel."""
    q, out = (torch.randn(1, 1, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    k, v = (torch.randn(KV_LEN, 1, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    one, cache = q[0], torch.randn(1, 2, PAGE_SIZE, 1, HEAD_DIM, device=device).bfloat16()
    pair, lse, of_torch = (
        cache.unbind(1),
        torch.empty(1, 1, device=device),
        [x.transpose(0, 1)[None] for x in (q, k, v)],
    )

    room = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(room)
    indptr, keys, page, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, KV_LEN], [0], [KV_LEN]))
    options = dict(q_data_type=torch.bfloat16)
    decode.plan(indptr, page, last, 1, 1, HEAD_DIM, PAGE_SIZE, **options)
    paged.plan(indptr, indptr, page, last, 1, 1, HEAD_DIM, PAGE_SIZE, causal=True, **options)
    ragged.plan(indptr, keys, 1, 1, HEAD_DIM, causal=True, **options)
    return {
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*of_torch),
        "single_decode": lambda: flashinfer.single_decode_with_kv_cache(one, k, v),
        "single_decode return_lse": lambda: flashinfer.single_decode_with_kv_cache(one, k, v, return_lse=True),
        "single_prefill": lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True),
        "decode run": lambda: decode.run(q, cache),
        "decode run, a pair of caches": lambda: decode.run(q, pair),
        "decode run, scales": lambda: decode.run(q, cache, k_scale=0.5, v_scale=2.0),
        "decode run out=": lambda: decode.run(q, cache, out=out),
        "decode run out= lse=": lambda: decode.run(q, cache, out=out, lse=lse, return_lse=True),
        "paged prefill run": lambda: paged.run(q, cache),
        "ragged prefill run": lambda: ragged.run(q, k, v),
        "ragged prefill run out=": lambda: ragged.run(q, k, v, out=out),
    }


def measured(calls: Calls, device: str) -> dict[str, float]:
    """Return the shortest of several medians of each. A CPU may take ten seconds to reach its clock."""
    rounds, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        rounds.append({name: host_seconds(call, device) for name, call in calls.items()})
    return {name: min(times[name] for times in rounds) for name in calls}


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("host time of a call")
    if options.device == "cpu":
        torch.set_num_threads(1)
    calls = {**memory_bound(options.device), **attention(options.device)}
    calls = {name: call for name, call in calls.items() if options.only in name}
    for call in calls.values():
        call()
    assert "torch._dynamo" not in sys.modules, "nothing is to import it by itself"
    alone = measured(calls, options.device)
    importlib.import_module("torch._dynamo")
    beside = measured(calls, options.device)
    for name, taken in alone.items():
        peers = {peer: alone[peer] * 1e6 for peer in ("F.rms_norm", "F.scaled_dot_product_attention") if peer in alone}
        report.add("us", taken * 1e6, peers, more={"with Dynamo imported": beside[name] * 1e6}, name=name)
    report.write(options.json)


if __name__ == "__main__":
    main()
