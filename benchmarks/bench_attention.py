"""Compare attention with torch's in one run: prefill in FLOP/s, paged decode in bytes per second.

FLOPs are 4 * queries * keys * heads * head_dim, halved when causal. Torch reads contiguous keys in its
fastest layout, never pages. `vs_torch` is torch's time over ours. On a CPU calls alternate and the fastest of
each counts, because other processes only add time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timing import Call, Report, arguments, seconds, sets_for, skewed
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashinfer
from flashinfer.xqa import xqa_batch_decode_with_kv_cache

# name, query length, key length, query heads, key heads, head_dim, causal, other options
PREFILL = {
    "cpu": [
        ("prefill", 1024, 1024, 8, 8, 128, False, {}),
        ("prefill", 4096, 4096, 2, 2, 128, False, {}),
        ("prefill", 4096, 4096, 2, 2, 128, True, {}),
        ("prefill", 2048, 2048, 8, 2, 128, True, {}),
        ("prefill", 2048, 2048, 4, 4, 64, False, {}),
        ("prefill_rope", 1024, 1024, 8, 8, 128, False, {"pos_encoding_mode": "ROPE_LLAMA"}),
        ("prefill_alibi", 1024, 1024, 8, 8, 128, False, {"pos_encoding_mode": "ALIBI"}),
        ("prefill_soft_cap", 1024, 1024, 8, 8, 128, False, {"logits_soft_cap": 30.0}),
    ],
    "cuda": [
        *(("prefill", n, n, 32, 8, 128, causal, {}) for n in (1024, 4096, 16384) for causal in (False, True)),
        *(("prefill", 4096, 4096, 16, 16, dim, causal, {}) for dim in (64, 256) for causal in (False, True)),
        ("prefill_append", 128, 16384, 32, 8, 128, False, {}),
        ("prefill_rope", 4096, 4096, 32, 8, 128, True, {"pos_encoding_mode": "ROPE_LLAMA"}),
        ("prefill_soft_cap", 4096, 4096, 32, 8, 128, True, {"logits_soft_cap": 30.0}),
    ],
}


# lengths of the requests, query heads, key heads, head_dim, page_size
DECODE = {
    "cpu": [
        ([8192], 32, 8, 128, 16),
        ([2048] * 16, 32, 8, 128, 16),
        ([16384, 4096, 1024] + [256] * 13, 32, 8, 128, 16),
    ],
    "cuda": [
        ([4096] * 64, 32, 8, 128, 16),
        ([4096] * 16, 32, 8, 128, 16),
        ([32768], 32, 8, 128, 16),
        (skewed(64, 230_000, 65_000), 32, 8, 128, 16),
        ([4096] * 64, 32, 8, 64, 16),
        ([4096] * 64, 32, 8, 256, 16),
        ([4096] * 64, 32, 8, 128, 1),
    ],
}
INVARIANT = "FLASHINFER_BATCH_INVARIANT"


@contextmanager
def batch_invariant() -> Iterator[None]:
    os.environ[INVARIANT] = "1"
    try:
        yield
    finally:
        del os.environ[INVARIANT]


DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Return torch's kernels of the same generation: flash attention on CUDA, its only ones on a CPU."""
    gqa = q.shape[1] != k.shape[1]
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


def both(ours: Call, torchs: Call, sets: int, device: str, budget: float = 2.0) -> tuple[float, float]:
    """Return the seconds of a call of each."""
    if device != "cpu":
        return seconds(ours, sets, device), seconds(torchs, sets, device)
    best, end, number = [float("inf")] * 2, time.perf_counter() + budget, 0
    while number < 5 or time.perf_counter() < end:
        for side, call in enumerate((ours, torchs)):
            start = time.perf_counter()
            call(number % sets)
            best[side] = min(best[side], time.perf_counter() - start)
        number += 1
    return best[0], best[1]


def prefill(case: tuple, name: str, device: str, report: Report) -> None:  # type: ignore[type-arg]
    label, qo_len, kv_len, qo_heads, kv_heads, dim, causal, more = case
    dtype = getattr(torch, name)
    shapes = ((qo_len, qo_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, dim))
    n = sets_for(sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize, device)
    sets = [[torch.randn(*shape, device=device).to(dtype) for shape in shapes] for _ in range(n)]
    theirs = [[x.transpose(0, 1)[None].contiguous() for x in one] for one in sets]

    def ours(i: int) -> None:
        flashinfer.single_prefill_with_kv_cache(*sets[i], causal=causal, **more)

    def torchs(i: int) -> None:
        torch_attention(*theirs[i], causal)

    ours(0)
    mine, peer = both(ours, torchs, n, device)
    flops = 4 * qo_len * kv_len * qo_heads * dim / (2 if causal else 1)
    report.add(
        "GFLOP/s", flops / mine / 1e9, {"torch SDPA": flops / peer / 1e9}, more={"ms": mine * 1e3},
        name=label, qo_len=qo_len, kv_len=kv_len, heads=f"{qo_heads}/{kv_heads}", head_dim=dim, causal=causal, dtype=name,
    )  # fmt: skip


def decode(case: tuple, name: str, device: str, report: Report) -> None:  # type: ignore[type-arg]
    lengths, qo_heads, kv_heads, dim, page_size = case
    dtype, batch = getattr(torch, name), len(lengths)
    pages = [-(-length // page_size) for length in lengths]
    total = 2 * sum(lengths) * kv_heads * dim * dtype.itemsize
    n = sets_for(total, device)
    caches = [torch.randn(sum(pages), 2, page_size, kv_heads, dim, device=device, dtype=dtype) for _ in range(n)]
    q = torch.randn(batch, qo_heads, dim, device=device).to(dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device))
    indices = torch.randperm(sum(pages), device=device).int()
    with batch_invariant():
        fixed = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device=device))

    def plan(planned: flashinfer.BatchDecodeWithPagedKVCacheWrapper) -> None:
        planned.plan(
            torch.tensor([0, *pages], device=device).cumsum(0).int(),
            indices,
            torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32, device=device),
            qo_heads, kv_heads, dim, page_size, q_data_type=dtype,
        )  # fmt: skip

    plan(wrapper)
    plan(fixed)
    equal = min(lengths) == max(lengths)
    # Flash attention takes no mask: on CUDA torch gets the same number of requests with the mean length.
    keys = max(lengths) if equal or device == "cpu" else sum(lengths) // batch
    padded = torch.randn(2, batch, kv_heads, keys, dim, device=device, dtype=dtype)
    mask = torch.arange(keys, device=device) < torch.tensor(lengths, device=device)[:, None, None, None]

    def torchs(_: int) -> None:
        if equal or device != "cpu":
            torch_attention(q[:, :, None], *padded)
        else:
            F.scaled_dot_product_attention(q[:, :, None], *padded, mask, enable_gqa=qo_heads != kv_heads)

    wrapper.run(q, caches[0])
    mine, peer = both(lambda i: wrapper.run(q, caches[i]), torchs, n, device)
    report.add(
        "GB/s", total / mine / 1e9, {"torch SDPA": total / peer / 1e9}, more={"ms": mine * 1e3},
        name="decode", batch=batch, keys=sum(lengths), longest=max(lengths), heads=f"{qo_heads}/{kv_heads}",
        head_dim=dim, page_size=page_size, dtype=name,
    )  # fmt: skip
    table = torch.zeros(batch, max(pages), dtype=torch.int32, device=device)
    for row, own in zip(table, indices.split(pages), strict=True):
        row[: own.numel()] = own
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    memory, out = torch.zeros(64 << 20, dtype=torch.uint8, device=device), torch.empty_like(q)

    def unplanned(i: int) -> None:
        xqa_batch_decode_with_kv_cache(q, caches[i], memory, table, lens, max(lengths), dim**-0.5, out=out)

    def invariant(i: int) -> None:
        with batch_invariant():
            unplanned(i)

    def planned(i: int) -> None:
        wrapper.run(q, caches[i], out=out)

    for label, ours, against, other in (
        ("decode without a plan", unplanned, planned, "with a plan"),
        ("decode, batch invariant", lambda i: fixed.run(q, caches[i], out=out), planned, "balanced"),
        ("decode without a plan, batch invariant", invariant, unplanned, "balanced"),
    ):
        ours(0)
        mine, peer = both(ours, against, n, device)
        report.add(
            "GB/s", total / mine / 1e9, {other: total / peer / 1e9}, more={"ms": mine * 1e3}, name=label, batch=batch,
            keys=sum(lengths), longest=max(lengths), heads=f"{qo_heads}/{kv_heads}", head_dim=dim,
            page_size=page_size, dtype=name,
        )  # fmt: skip


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("attention")
    for name in DTYPES[options.device]:
        for case in PREFILL[options.device]:
            if options.only in case[0]:
                prefill(case, name, options.device, report)
        for shape in DECODE[options.device]:
            if options.only in "decode":
                decode(shape, name, options.device, report)
    report.write(options.json)


if __name__ == "__main__":
    main()
