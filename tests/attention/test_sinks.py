"""Attention sinks: one more logit in every row's softmax, counted once for any number of splits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, variant_dtype, workspace

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
KINDS = ["decode", "prefill"]
OPTIONS: list[dict[str, Any]] = [
    dict(), dict(window_left=9), dict(logits_soft_cap=5.0), dict(sm_scale=0.3), dict(window_left=40, sm_scale=0.05),
]  # fmt: skip


class Served:
    """Return a planned batch with a request of many keys and one without keys."""

    def __init__(self, kind: str, device: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        dtype = dtype or variant_dtype(device)
        kv_lens = [1, random.randint(2, 60), 0, random.randint(1500, 2500), 33]
        self.qo_lens = [1] * 5 if kind == "decode" else [1, 2, 3, 40, 33]
        self.options = {k: v for k, v in options.items() if k not in ("fixed_split_size", "disable_split_kv")}
        self.paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, dtype, device)
        self.q = drawn((sum(self.qo_lens), HEADS, DIM), dtype, device)
        self.wrapper: Any
        if kind == "decode":
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
            tables = self.paged.tables_on("cpu")
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
            tables, self.options = (
                (indptr_of(self.qo_lens), *self.paged.tables_on("cpu")),
                self.options | dict(causal=True),
            )
            options = options | dict(causal=True)
        self.wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=dtype, **options)

    def check(self, sinks: torch.Tensor, **more: Any) -> None:
        requests = [self.paged.request(b) for b in range(len(self.qo_lens))]
        want, want_lse = batch_attention(self.q, self.qo_lens, requests, sinks=sinks, **(self.options | more))
        out = torch.full(want.shape, float("nan"), device=self.q.device).to(self.q.dtype)
        lse = torch.full(want_lse.shape, float("nan"), device=self.q.device)
        self.wrapper.run(self.q, self.paged.cache, sinks=sinks, out=out, lse=lse)
        assert_near(out, want, lse, want_lse)


def sinks_on(device: str) -> torch.Tensor:
    """Return small and large sinks, and two without effect."""
    return torch.tensor([0.5, -2.0, 4.0, -float("inf"), -200.0, 3.0, 0.0, 1.0], device=device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sinks(kind, options, device):
    served = Served(kind, device, **options)
    served.check(sinks_on(device))
    served.check(torch.randn(HEADS, device=device))


@pytest.mark.parametrize(
    "split", [dict(disable_split_kv=True), dict(fixed_split_size=1), dict(fixed_split_size=7)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_counts_once_for_any_number_of_splits(kind, split, device):
    Served(kind, device, **split).check(sinks_on(device))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_that_outweighs_all_keys(kind, device):
    served = Served(kind, device)
    out, lse = served.wrapper.run(
        served.q, served.paged.cache, sinks=torch.full((HEADS,), 300.0, device=device), return_lse=True
    )
    assert not bool(out.any())
    torch.testing.assert_close(lse, torch.full_like(lse, 300 / math.log(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_runs_with_and_without(kind, device):
    served = Served(kind, device)
    plain = served.wrapper.run(served.q, served.paged.cache)
    served.check(torch.randn(HEADS, device=device))
    assert torch.equal(served.wrapper.run(served.q, served.paged.cache), plain)


def test_the_wrapper_of_models_with_sinks(device):
    served = Served("prefill", device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(device), "NHD", backend="auto", q_data_type=served.q.dtype, kv_data_type=served.q.dtype, head_dim_qk=DIM,
        head_dim_vo=DIM, window_left=20,
    )  # fmt: skip
    tables = indptr_of(served.qo_lens), *served.paged.tables_on("cpu")
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, causal=True, window_left=20, q_data_type=served.q.dtype)
    requests = [served.paged.request(b) for b in range(len(served.qo_lens))]
    for sm_scale in (0.1, 0.4):
        sinks = torch.randn(HEADS, device=device)
        options = dict(causal=True, window_left=20, sm_scale=sm_scale, sinks=sinks)
        want, want_lse = batch_attention(served.q, served.qo_lens, requests, **options)
        out, lse = wrapper.run(served.q, served.paged.cache, sinks, sm_scale, return_lse=True)
        assert_near(out, want, lse, want_lse)
    assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    with pytest.raises(TypeError, match="got 1 more arguments, wanted two: sinks and sm_scale"):
        wrapper.run(served.q, served.paged.cache, sinks)


def test_mistakes(device):
    served = Served("decode", device)
    for error, message, sinks in (
        (TypeError, "sinks: got float, wanted Tensor", 0.5),
        (ValueError, r"sinks: got shape \[3\], wanted \[8\]", torch.zeros(3, device=device)),
        (TypeError, "sinks: got torch.float16", torch.zeros(HEADS, device=device).half()),
        (ValueError, "sinks: got a tensor on meta", torch.zeros(HEADS, device="meta")),
        (GradientError, "has no gradient", torch.zeros(HEADS, device=device, requires_grad=True)),
    ):
        with pytest.raises(error, match=message):
            served.wrapper.run(served.q, served.paged.cache, sinks=sinks)


@pytest.mark.parametrize("kind", KINDS)
def test_in_one_graph(kind, device, cold_dynamo):
    served = Served(kind, device)
    compiled = torch.compile(
        lambda q, cache, sinks: served.wrapper.run(q, cache, sinks=sinks), backend="eager", fullgraph=True
    )
    for _ in range(2):
        sinks = torch.randn(HEADS, device=device)
        want = served.wrapper.run(served.q, served.paged.cache, sinks=sinks)
        assert torch.equal(compiled(served.q, served.paged.cache, sinks), want)
