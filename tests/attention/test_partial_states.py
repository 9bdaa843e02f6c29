"""Split keys with large logits. Merges keep the float32 precision of each split's l."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import flashinfer

from ..support.attention_oracle import indptr_of, int32, workspace

LOGIT = 2.0**20  # the logit of every key; near it, float32 has steps of 1/8
KV_LENS = (1000, 777, 2501, 9001, 5003)
HEADS, PAGE = 2, 16


def queries(rows: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    q = torch.zeros(rows, HEADS, dim, dtype=dtype, device=device)
    q[..., 0] = 1024
    return q


def keys(dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys with equal logits and values that rise along each request, in consecutive pages."""
    pages = sum(math.ceil(n / PAGE) for n in KV_LENS)
    k = torch.zeros(pages * PAGE, 1, dim, dtype=dtype, device=device)
    v = torch.full_like(k, math.nan)
    k[..., 0] = 1024
    start = 0
    for n in KV_LENS:
        v[start : start + n] = torch.linspace(0, 1, n, dtype=torch.float64).to(k)[:, None, None]
        start += math.ceil(n / PAGE) * PAGE
    return k, v


def means(v: torch.Tensor) -> list[torch.Tensor]:
    """Return the float64 result of each request: the mean of its values."""
    starts = [0]
    for n in KV_LENS:
        starts.append(starts[-1] + math.ceil(n / PAGE) * PAGE)
    return [v[start : start + n].cpu().double().mean(0)[0] for start, n in zip(starts, KV_LENS, strict=False)]


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = indptr_of([math.ceil(n / PAGE) for n in KV_LENS])
    return pages, torch.arange(int(pages[-1]), dtype=torch.int32), int32([(n - 1) % PAGE + 1 for n in KV_LENS])


def assert_means(out: torch.Tensor, lse: torch.Tensor, v: torch.Tensor, rows: int) -> None:
    bound = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[out.dtype]
    for b, (want, n) in enumerate(zip(means(v), KV_LENS, strict=True)):
        got = out[b * rows : (b + 1) * rows].cpu().double()
        assert float((got - want).abs().max()) <= bound, (n, float((got - want).abs().max()))
        want_lse = LOGIT * math.log2(math.e) + math.log2(n)
        assert float((lse[b * rows : (b + 1) * rows].cpu().double() - want_lse).abs().max()) <= 0.25


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(q.device.type))
    wrapper.plan(*tables(), HEADS, 1, q.shape[-1], PAGE, q_data_type=q.dtype, sm_scale=1.0)
    return wrapper.run(q, (k.view(-1, PAGE, 1, k.shape[-1]), v.view(-1, PAGE, 1, k.shape[-1])), return_lse=True)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device.type))
    rows = indptr_of([len(q) // len(KV_LENS)] * len(KV_LENS))
    wrapper.plan(rows, *tables(), HEADS, 1, q.shape[-1], PAGE, q_data_type=q.dtype, sm_scale=1.0)
    return wrapper.run(q, (k.view(-1, PAGE, 1, k.shape[-1]), v.view(-1, PAGE, 1, k.shape[-1])), return_lse=True)


@pytest.mark.parametrize(("call", "rows"), [(decode, 1), (prefill, 3)], ids=["decode", "prefill"])
@pytest.mark.parametrize("dim", [64, 128])
def test_equal_logits(call: Callable[..., tuple[torch.Tensor, torch.Tensor]], rows: int, dim: int, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    k, v = keys(dim, dtype, device)
    assert_means(*call(queries(rows * len(KV_LENS), dim, dtype, device), k, v), v, rows)


@pytest.mark.parametrize("call", ["decode", "prefill"])
def test_one_request(call: str, device: str) -> None:
    dtype, n = (torch.float32 if device == "cpu" else torch.float16), 9001
    q = queries(1, 128, dtype, device)
    k = torch.zeros(n, 1, 128, dtype=dtype, device=device)
    k[..., 0] = 1024
    v = torch.linspace(0, 1, n, dtype=torch.float64).to(k)[:, None, None].repeat(1, 1, 128)
    if call == "decode":
        out = flashinfer.single_decode_with_kv_cache(q[0], k, v, sm_scale=1.0)
    else:
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, sm_scale=1.0)[0]
    want = v.cpu().double().mean(0)[0]
    assert float((out.cpu().double() - want).abs().max()) <= (2e-6 if dtype == torch.float32 else 5e-4)


def test_latent_attention(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _, v = keys(512, dtype, device)
    q_nope = torch.zeros(len(KV_LENS), HEADS, 512, dtype=dtype, device=device)
    pages, indices, _ = tables()
    kpe = torch.zeros(len(v), 64, dtype=dtype, device=device)
    kpe[:, 0] = 1024
    q_pe = torch.zeros(len(KV_LENS), HEADS, 64, dtype=dtype, device=device)
    q_pe[..., 0] = 1024
    v = v.nan_to_num(7.0)  # no request owns the rest of a page
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(device))
    one_each = indptr_of([1] * len(KV_LENS))
    wrapper.plan(one_each, pages, indices, int32(KV_LENS), HEADS, 512, 64, PAGE, False, 1.0, dtype, dtype)
    out, lse = wrapper.run(q_nope, q_pe, v.view(-1, PAGE, 512), kpe.view(-1, PAGE, 64), return_lse=True)
    assert_means(out, lse, v, 1)
