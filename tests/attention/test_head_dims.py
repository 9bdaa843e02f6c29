"""Head sizes other than 64, 128 and 256 against float64: single requests, wrappers, calls without a plan."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from flashinfer.jit.modules._attention import COMMON_HEAD_DIMS, CUDA_HEAD_DIMS, attention_spec
from tests.support.attention_oracle import (
    FLOAT8,
    Paged,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    workspace,
)

BF16, F16, E4M3 = torch.bfloat16, torch.float16, FLOAT8[0]
OTHERS = [int(value) for value in CUDA_HEAD_DIMS if value not in COMMON_HEAD_DIMS]
# Dtypes of queries and of keys, and a head size. Each compiles a module of decode and one of prefill.
MODULES = [(F16, F16, 512), (F16, FLOAT8[1], 512), *((BF16, dtype, size) for size in OTHERS for dtype in (BF16, E4M3))]
HEADS = [(8, 1), (16, 1), (8, 2), (3, 3)]  # Gemma's groups are 8 and 16


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.slow) for one in MODULES],
                ids=lambda one: f"{one[0]}-{one[1]}-{one[2]}".replace("torch.", ""))  # fmt: skip
def module(request):
    return request.param


def options_of(causal: bool) -> dict:
    """Draw the options that are run-time values of a module."""
    return dict(window_left=random.choice([-1, -1, 0, 7, 40])) | (dict(causal=random.random() < 0.7) if causal else {})


def test_single(module, device):
    dtype_q, dtype_kv, size = module
    for heads in HEADS:
        kv_len, layout = random.choice([1, 33, random.randint(500, 900)]), random.choice(["NHD", "HND"])
        k, v = drawn((kv_len, heads[1], size), dtype_kv, device), drawn((kv_len, heads[1], size), dtype_kv, device)
        given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
        q, options = drawn((heads[0], size), dtype_q, device), options_of(False)
        out, lse = flashinfer.single_decode_with_kv_cache(q, *given, layout, return_lse=True, **options)
        want, want_lse = attention(q[None], k.float(), v.float(), **options)
        assert_near(out, want[0], lse, want_lse[0])
        for qo_len in (1, random.randint(2, 40), random.randint(41, 200)):
            q, options = drawn((qo_len, heads[0], size), dtype_q, device), options_of(True)
            out, lse = flashinfer.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, **options)
            want, want_lse = attention(q, k.float(), v.float(), **options)
            assert_near(out, want, lse, want_lse)


def paged_of(module, heads, kv_lens, layout, device):
    form = random.choice(["one", "pair", "torn"])
    return Paged(kv_lens, random.choice([1, 5, 16, 64]), heads[1], module[2], module[1], device, layout, form)


def test_decode_wrapper(module, device):
    dtype_q, dtype_kv, size = module
    for heads in HEADS:
        layout = random.choice(["NHD", "HND"])
        paged = paged_of(module, heads, [0, 1, random.randint(2, 99), random.randint(900, 1500)], layout, device)
        options = options_of(False)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
        wrapper.plan(*paged.tables_on("cpu"), *heads, size, paged.page_size, q_data_type=dtype_q,
                     kv_data_type=dtype_kv, **options)  # fmt: skip
        q = drawn((4, heads[0], size), dtype_q, device)
        out = torch.full_like(q, torch.nan)
        _, lse = wrapper.run(q, paged.cache, out=out, return_lse=True)
        want, want_lse = batch_attention(q, [1] * 4, [paged.request(b) for b in range(4)], **options)
        assert_near(out, want, lse, want_lse)


def test_prefill_wrappers(module, device):
    dtype_q, dtype_kv, size = module
    for heads in HEADS:
        qo_lens, kv_lens = [0, 5, 1, random.randint(20, 70)], [3, 5, random.randint(300, 600), random.randint(70, 200)]
        layout, options = random.choice(["NHD", "HND"]), options_of(True)
        paged = paged_of(module, heads, kv_lens, layout, device)
        requests = [paged.request(b) for b in range(4)]
        q = drawn((sum(qo_lens), heads[0], size), dtype_q, device)
        want, want_lse = batch_attention(q, qo_lens, requests, **options)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
        wrapper.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), *heads, size, paged.page_size, q_data_type=dtype_q,
                     kv_data_type=dtype_kv, **options)  # fmt: skip
        out = torch.full_like(q, torch.nan)
        _, lse = wrapper.run(q, paged.cache, out=out, return_lse=True)
        assert_near(out, want, lse, want_lse)
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD")
        ragged.plan(indptr_of(qo_lens), indptr_of(kv_lens), *heads, size, q_data_type=dtype_q, kv_data_type=dtype_kv,
                    **options)  # fmt: skip
        k, v = (torch.cat([request[i] for request in requests]).to(dtype_kv).to(device) for i in range(2))
        out, lse = ragged.run(q, k, v, return_lse=True)
        assert_near(out, want, lse, want_lse)


@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_without_a_plan(q_len, module, device):
    dtype_q, _, size = module
    paged = paged_of(module, (8, 1), [q_len, 50, 700], "NHD", device)
    tables = torch.zeros(3, max(map(len, paged.tables)), dtype=torch.int32)
    for row, pages in zip(tables, paged.tables, strict=True):
        row[: len(pages)] = torch.tensor(pages)
    q = drawn((3 * q_len, 8, size), dtype_q, device)
    cache = paged.cache if isinstance(paged.cache, tuple) else (paged.cache[:, 0], paged.cache[:, 1])
    lens = torch.tensor(paged.kv_lens, dtype=torch.int32, device=device)
    out = xqa_batch_decode_with_kv_cache(
        q, cache, workspace(device), tables.to(device), lens, 800, size**-0.5, q_len_per_req=q_len
    )
    want, _ = batch_attention(q, [q_len] * 3, [paged.request(b) for b in range(3)], causal=True)
    assert_near(out, want)


@pytest.mark.slow
def test_soft_cap(device):
    q, k, v = drawn((40, 8, 512), BF16, device), *(drawn((90, 1, 512), BF16, device) for _ in range(2))
    options = dict(causal=True, logits_soft_cap=5.0, window_left=30)
    assert_near(flashinfer.single_prefill_with_kv_cache(q, k, v, **options), attention(q, k, v, **options)[0])


@pytest.mark.parametrize("value", [str(size) for size in OTHERS])
def test_rotation_on_the_fly_has_no_kernel_on_cuda(value):
    for family in ("decode", "prefill"):
        with pytest.raises(
            ValueError, match=f"pos_encoding_mode: got ROPE_LLAMA with head_dim {value}, wanted another"
        ):
            attention_spec(family, "cuda", "bfloat16:bfloat16:bfloat16", value, "rope")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU rotates every head size")
def test_rotation_on_the_fly_names_the_function():
    x = torch.ones(1, 1, 512, dtype=BF16, device="cuda")
    with pytest.raises(
        ValueError, match="single_prefill_with_kv_cache: pos_encoding_mode: got ROPE_LLAMA with head_dim"
    ):
        flashinfer.single_prefill_with_kv_cache(x, x, x, pos_encoding_mode="ROPE_LLAMA")
