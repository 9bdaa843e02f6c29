"""BatchAttention: one plan for requests with any numbers of queries, against float64."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer

from ..support.attention_oracle import (
    FLOAT8_CASES,
    Paged,
    assert_near,
    batch_attention,
    drawn,
    indptr_of,
    int32,
    variant_dtype,
)

HEADS, KV_HEADS, DIM = 8, 2, 64
# Decodes, a chunk of a prefill, a request without queries and one without keys.
QO_LENS, KV_LENS = [1, 1, 70, 0, 1, 3, 1], [33, 500, 130, 9, 0, 3, 1]


def plan(wrapper, paged: Paged, qo_lens: list[int], device: str, page_size: int, dtype: torch.dtype, **options) -> None:
    indptr, indices, _ = paged.tables_on(device)
    wrapper.plan(
        indptr_of(qo_lens).to(device), indptr, indices, int32(paged.kv_lens, device), HEADS, KV_HEADS, DIM, DIM,
        page_size, q_data_type=dtype, **{"kv_data_type": dtype, **options},
    )  # fmt: skip


@pytest.mark.parametrize("layout, form, page_size", [("NHD", "one", 16), ("HND", "pair", 5), ("NHD", "torn", 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_mixed_lengths(layout, form, page_size, causal, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")
    wrapper = flashinfer.BatchAttention(layout)
    order = random.sample(range(len(QO_LENS)), len(QO_LENS))
    for qo_lens, kv_lens in ((QO_LENS, KV_LENS), ([QO_LENS[i] for i in order], [KV_LENS[i] for i in order])):
        paged = Paged(kv_lens, page_size, KV_HEADS, DIM, dtype, device, layout, form)
        plan(wrapper, paged, qo_lens, device, page_size, dtype, causal=causal)
        q = drawn((sum(qo_lens), HEADS, DIM), dtype, device)
        requests = [paged.request(b) for b in range(len(kv_lens))]
        want, want_lse = batch_attention(q, qo_lens, requests, causal=causal)
        out, lse = wrapper.run(q, paged.cache)
        assert_near(out, want, lse, want_lse)
        given = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        got = wrapper.run(q, paged.cache, *given)
        assert got[0] is given[0] and got[1] is given[1]
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("kv_dtype", FLOAT8_CASES, ids=["e4m3", "e5m2"])
def test_quantised_keys_and_a_scale(kv_dtype, device):
    paged = Paged(KV_LENS, 16, KV_HEADS, DIM, kv_dtype, device)
    wrapper = flashinfer.BatchAttention()
    plan(wrapper, paged, QO_LENS, device, 16, torch.float16, sm_scale=0.2, kv_data_type=kv_dtype)
    q = drawn((sum(QO_LENS), HEADS, DIM), torch.float16, device)
    requests = [paged.request(b) for b in range(len(KV_LENS))]
    want, want_lse = batch_attention(q, QO_LENS, requests, sm_scale=0.2)
    out, lse = wrapper.run(q, paged.cache)
    assert_near(out, want, lse, want_lse)


def test_a_cap_and_scales_of_a_call(device):
    dtype = variant_dtype(device)
    paged = Paged(KV_LENS, 16, KV_HEADS, DIM, dtype, device)
    wrapper = flashinfer.BatchAttention()
    plan(wrapper, paged, QO_LENS, device, 16, dtype, causal=True, logits_soft_cap=1.5)
    q = drawn((sum(QO_LENS), HEADS, DIM), dtype, device)
    requests = [(k.double() * 0.75, v.double() * 2) for k, v in (paged.request(b) for b in range(len(KV_LENS)))]
    want, want_lse = batch_attention(q, QO_LENS, requests, causal=True, logits_soft_cap=1.5)
    for again in (None, 0, 1.5):
        out, lse = wrapper.run(q, paged.cache, k_scale=0.75, v_scale=2.0, logits_soft_cap=again)
        assert_near(out, want, lse, want_lse)
    with pytest.raises(ValueError, match=r"BatchAttention.run: logits_soft_cap: got 2.0, wanted the plan's, 1.5"):
        wrapper.run(q, paged.cache, logits_soft_cap=2.0)


def test_pages_that_are_not_filled(device):
    """kv_len_arr gives the lengths. A request may own pages that it has not filled."""
    paged = Paged([64, 64], 16, KV_HEADS, DIM, torch.bfloat16, device)
    wrapper = flashinfer.BatchAttention()
    indptr, indices, _ = paged.tables_on(device)
    lens = [20, 0]
    wrapper.plan(
        indptr_of([2, 1]).to(device), indptr, indices, int32(lens, device), HEADS, KV_HEADS, DIM, DIM, 16, causal=True
    )
    q = drawn((3, HEADS, DIM), torch.bfloat16, device)
    requests = [tuple(x[:n] for x in paged.request(b)) for b, n in enumerate(lens)]
    want, want_lse = batch_attention(q, [2, 1], requests, causal=True)
    out, lse = wrapper.run(q, paged.cache)
    assert_near(out, want, lse, want_lse)


def test_bad_arguments(device):
    with pytest.raises(ValueError, match="BatchAttention: kv_layout: got 'NDH', wanted 'NHD' or 'HND'"):
        flashinfer.BatchAttention("NDH")
    wrapper = flashinfer.BatchAttention()
    paged = Paged(KV_LENS, 16, KV_HEADS, DIM, torch.bfloat16, device)
    q = drawn((sum(QO_LENS), HEADS, DIM), torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"BatchAttention.run: got no plan, wanted a call of plan\(\) before"):
        wrapper.run(q, paged.cache)
    indptr, indices, _ = paged.tables_on("cpu")
    given = {
        "qo_indptr": indptr_of(QO_LENS), "kv_indptr": indptr, "kv_indices": indices, "kv_len_arr": int32(KV_LENS),
        "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": DIM, "head_dim_vo": DIM, "page_size": 16,
    }  # fmt: skip
    for change, error, message in (
        ({"qo_indptr": indptr_of(QO_LENS).float()}, TypeError, "qo_indptr: got torch.float32, wanted torch.int32"),
        ({"kv_indptr": indptr[1:]}, ValueError, "kv_indptr: got 7 elements, wanted 8, one more than requests"),
        ({"kv_len_arr": int32(KV_LENS[1:])}, ValueError, "kv_len_arr: got 6 elements, wanted 7"),
        ({"kv_len_arr": int32([49, *KV_LENS[1:]])}, ValueError, r"kv_len_arr\[0\]: got 49, wanted 0 to 48, the slots"),
        ({"kv_len_arr": int32([-1, *KV_LENS[1:]])}, ValueError, r"kv_len_arr\[0\]: got -1"),
        ({"kv_indices": indices[1:]}, ValueError, f"kv_indices: got {indices.numel() - 1} pages, wanted at least"),
        ({"kv_indices": indices - 1000}, ValueError, "kv_indices: got -.*, wanted at least 0"),
        ({"page_size": "8"}, TypeError, "page_size: got str, wanted an integer"),
        ({"page_size": 0}, ValueError, "page_size: got 0, wanted a positive number"),
        ({"num_qo_heads": 3}, ValueError, "num_qo_heads: got 3, wanted a multiple of num_kv_heads, 2"),
    ):
        with pytest.raises(error, match=f"BatchAttention.plan: {message}"):
            wrapper.plan(**{**given, **change})
    plan(wrapper, paged, QO_LENS, device, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="profiler_buffer: got Tensor, wanted None"):
        wrapper.run(q, paged.cache, profiler_buffer=q)
    with pytest.raises(ValueError, match=r"q: got 76 queries, and plan\(\) was called for 77"):
        wrapper.run(q[1:], paged.cache)
    with pytest.raises(TypeError, match="q: got torch.float16"):
        wrapper.run(q.half(), paged.cache)
