"""Time of plan() and host time of run(), by the number of requests; lengths on the CPU, as a server has them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from timing import Report, arguments, host_seconds

import flashinfer

HEADS, HEAD_DIM, PAGE_SIZE = (32, 8), 128, 16


def plan_seconds(plan: Callable[[], object], device: str) -> float:
    """Median time of one plan, each with the device idle: what a server waits for between two steps."""
    taken = []
    for _ in range(200):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def int32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int32)


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("plan() and run() on the host")
    device, dtype = options.device, torch.bfloat16
    room = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    for batch in (1, 16, 64, 256):
        pages = torch.randint(1, 257, (batch,))
        indptr = int32(torch.nn.functional.pad(pages.cumsum(0), (1, 0)))
        indices = int32(torch.randint(0, 1024, (int(indptr[-1]),)))
        last = int32(torch.randint(1, PAGE_SIZE + 1, (batch,)))
        qo_indptr = int32(torch.nn.functional.pad(torch.randint(1, 65, (batch,)).cumsum(0), (1, 0)))
        tables, shape = (indptr, indices, last), (*HEADS, HEAD_DIM, PAGE_SIZE)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room)
        plans = {
            "decode.plan": lambda: decode.plan(*tables, *shape, q_data_type=dtype),  # noqa: B023
            "prefill.plan": lambda: prefill.plan(qo_indptr, *tables, *shape, causal=True, q_data_type=dtype),  # noqa: B023
        }
        for name, plan in plans.items():
            if options.only in name:
                plan()
                report.add("us", plan_seconds(plan, device) * 1e6, name=name, batch=batch)
    if options.only in "decode.run":
        q, cache = (torch.randn(n, device=device).to(dtype) for n in ((1, 32, 128), (2, 2, 16, 8, 128)))
        decode.plan(*(int32(torch.tensor(x)) for x in ([0, 1], [0], [1])), *shape, q_data_type=dtype)
        k, out = cache[0, 0], torch.empty_like(q)
        calls = {
            "decode.run": lambda: decode.run(q, cache),
            "decode.run out=": lambda: decode.run(q, cache, out=out),
            "single_decode": lambda: flashinfer.single_decode_with_kv_cache(q[0], k, k),
            "torch.add out=": lambda: torch.add(q, q, out=out),
        }
        for name, call in calls.items():
            report.add("us", host_seconds(call, device) * 1e6, name=name, batch=1)
    report.write(options.json)


if __name__ == "__main__":
    main()
