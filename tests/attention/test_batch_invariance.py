"""Batch-invariant mode: a request has the same bits alone and with drawn neighbours, in every family."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.env import BATCH_INVARIANT
from flashinfer.errors import EnvironmentValueError
from flashinfer.prefill import trtllm_fmha_v2_prefill
from flashinfer.xqa import xqa_batch_decode_with_kv_cache

from ..support.attention_oracle import drawn, indptr_of, int32, workspace

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 16
SCALE = DIM**-0.5


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_INVARIANT.name, "1")


class Requests:
    """Requests over one paged cache. A batch is any selection of them."""

    def __init__(self, device: str, counts: Sequence[int], kv_lens: Sequence[int]) -> None:
        self.device, self.counts, self.kv_lens = device, list(counts), list(kv_lens)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        pages = [-(-length // PAGE) for length in kv_lens]
        self.pages = list(torch.randperm(sum(pages)).int().split(pages))
        self.cache = drawn((sum(pages), 2, PAGE, KV_HEADS, DIM), dtype, device)
        self.q = [drawn((count, HEADS, DIM), dtype, device) for count in counts]
        self.dtype = dtype

    def select(self, batch: Sequence[int]) -> tuple[torch.Tensor, list[int], list[int]]:
        return torch.cat([self.q[b] for b in batch]), [self.counts[b] for b in batch], [self.kv_lens[b] for b in batch]

    def paged(self, batch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = [self.pages[b] for b in batch]
        last = [(self.kv_lens[b] - 1) % PAGE + 1 for b in batch]
        return indptr_of([len(one) for one in pages]), torch.cat(pages), int32(last)

    def table(self, batch: Sequence[int]) -> torch.Tensor:
        pages = [self.pages[b] for b in batch]
        table = torch.zeros(len(batch), max(map(len, pages)), dtype=torch.int32)
        for row, one in zip(table, pages, strict=True):
            row[: len(one)] = one
        return table.to(self.device)


def planned_decode(requests: Requests, batch: Sequence[int], **options: Any) -> torch.Tensor:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(requests.device), **options)
    q, counts, _ = requests.select(batch)
    wrapper.plan(
        *requests.paged(batch), HEADS, KV_HEADS, DIM, PAGE, q_data_type=requests.dtype, q_len_per_req=counts[0]
    )
    return wrapper.run(q, requests.cache)


def decode_of_graphs(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    sizes = len(batch) + 1, sum(map(len, requests.pages)), len(batch)
    buffers = [torch.zeros(size, dtype=torch.int32, device=requests.device) for size in sizes]
    names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
    return planned_decode(requests, batch, use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))


def several_queries(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    return planned_decode(requests, batch, use_tensor_cores=True)


def prefill(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(requests.device))
    q, counts, _ = requests.select(batch)
    wrapper.plan(indptr_of(counts), *requests.paged(batch), HEADS, KV_HEADS, DIM, PAGE, causal=True,
                 q_data_type=requests.dtype)  # fmt: skip
    return wrapper.run(q, requests.cache)


def ragged(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(requests.device))
    q, counts, kv_lens = requests.select(batch)
    rows = [
        requests.cache[requests.pages[b].long()].transpose(1, 2).flatten(0, 1)[: requests.kv_lens[b]] for b in batch
    ]
    k, v = (part.contiguous() for part in torch.cat(rows).unbind(1))
    wrapper.plan(indptr_of(counts), indptr_of(kv_lens), HEADS, KV_HEADS, DIM, causal=True, q_data_type=requests.dtype)
    return wrapper.run(q, k, v)


def plan_free(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    q, counts, kv_lens = requests.select(batch)
    return xqa_batch_decode_with_kv_cache(
        q, requests.cache, workspace(requests.device), requests.table(batch), int32(kv_lens, requests.device),
        max(kv_lens), SCALE, q_len_per_req=counts[0],
    )  # fmt: skip


def plan_free_ragged(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    q, counts, kv_lens = requests.select(batch)
    return xqa_batch_decode_with_kv_cache(
        q, requests.cache, workspace(requests.device), requests.table(batch), int32(kv_lens, requests.device),
        max(kv_lens), SCALE, q_len_per_req=max(counts), q_cu_seq_lens=indptr_of(counts).to(requests.device),
    )  # fmt: skip


def device_prefill(requests: Requests, batch: Sequence[int]) -> torch.Tensor:
    q, counts, kv_lens = requests.select(batch)
    return trtllm_fmha_v2_prefill(
        (q, requests.cache), "Q_PAGED_KV_NHD", workspace(requests.device), int32(kv_lens, requests.device), max(counts),
        max(kv_lens), SCALE, 1.0, len(batch), indptr_of(counts).to(requests.device),
        indptr_of(kv_lens).to(requests.device), requests.table(batch),
    )  # fmt: skip


def check(run: Callable[[Requests, Sequence[int]], torch.Tensor], requests: Requests, draws: int = 6) -> None:
    """Check requests alone against the same ones among drawn neighbours, in a drawn order."""
    everything = range(len(requests.counts))
    alone = [run(requests, [b]) for b in everything]
    assert all(bool(torch.isfinite(one).all()) for one in alone)
    for _ in range(draws):
        batch = random.sample(everything, random.randint(2, len(everything)))
        out = run(requests, batch)
        for b, rows in zip(batch, out.split([requests.counts[b] for b in batch]), strict=True):
            assert torch.equal(rows, alone[b]), (b, batch, requests.counts, requests.kv_lens)


def drawn_lens(number: int, least: int = 1) -> list[int]:
    """Return lengths of which some have several splits."""
    return [random.choice([random.randint(least, 300), random.randint(1000, 5000), 2048, 2049]) for _ in range(number)]


@pytest.mark.parametrize("run", [planned_decode, decode_of_graphs, plan_free])
def test_decode(run, invariant, device):
    lens = drawn_lens(9)
    check(run, Requests(device, [1] * len(lens), lens))


@pytest.mark.parametrize("run", [several_queries, plan_free])
def test_several_queries(run, invariant, device):
    lens = drawn_lens(7, least=4)
    check(run, Requests(device, [random.choice([2, 4])] * len(lens), lens))


@pytest.mark.parametrize("run", [prefill, ragged, plan_free_ragged, device_prefill])
def test_prefill(run, invariant, device):
    """Counts of queries lie on both sides of the sizes at which tiles change."""
    lens = [random.randint(150, 1500) for _ in range(6)]
    counts = [1, 2, random.randint(3, 12), random.randint(20, 60), random.randint(60, 150), 1]
    check(run, Requests(device, counts, lens), draws=5)


def planned_latent(part: dict[str, Any], batch: Sequence[int]) -> torch.Tensor:
    device, pages = part["ckv"].device, part["pages"]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device.type))
    wrapper.plan(
        indptr_of([part["counts"][b] for b in batch]), indptr_of([len(pages[b]) for b in batch]),
        torch.cat([pages[b] for b in batch]), int32([part["kv_lens"][b] for b in batch]), 16, 512, 64, PAGE, True,
        (128 + 64) ** -0.5, part["ckv"].dtype, part["ckv"].dtype,
    )  # fmt: skip
    return wrapper.run(
        *(torch.cat([part[name][b] for b in batch]) for name in ("nope", "pe")), part["ckv"], part["kpe"]
    )


def test_latent_attention(invariant, device):
    dtype = torch.bfloat16
    for counts in ([1] * 6, [1, 2, 3, 5, 1, 4]):
        kv_lens = [random.randint(10, 300) for _ in counts[:4]] + [random.randint(2100, 3000), 2049]
        sizes = [-(-length // PAGE) for length in kv_lens]
        part = dict(
            counts=counts, kv_lens=kv_lens, pages=torch.randperm(sum(sizes)).int().split(sizes),
            ckv=drawn((sum(sizes), PAGE, 512), dtype, device), kpe=drawn((sum(sizes), PAGE, 64), dtype, device),
            nope=[drawn((count, 16, 512), dtype, device) for count in counts],
            pe=[drawn((count, 16, 64), dtype, device) for count in counts],
        )  # fmt: skip
        alone = [planned_latent(part, [b]) for b in range(6)]
        for _ in range(4):
            batch = random.sample(range(6), random.randint(2, 6))
            rows = planned_latent(part, batch).split([counts[b] for b in batch])
            assert all(torch.equal(one, alone[b]) for one, b in zip(rows, batch, strict=True)), (batch, counts, kv_lens)


@pytest.mark.parametrize("hidden", [64, 1000, 4096, 8192])
def test_norms(hidden, invariant, dtype, device):
    """Few rows would take another kernel on a GPU, which adds in another order."""
    x, residual = (drawn((300, hidden), dtype, device) for _ in range(2))
    weight, bias = (drawn((hidden,), dtype, device) for _ in range(2))

    def fused(rows: slice) -> torch.Tensor:
        out, total = x[rows].clone(), residual[rows].clone()
        flashinfer.fused_add_rmsnorm(out, total, weight)
        return torch.cat([out, total], 1)

    for norm in (
        fused,
        lambda rows: flashinfer.rmsnorm(x[rows], weight),
        lambda rows: flashinfer.gemma_rmsnorm(x[rows], weight),
        lambda rows: (
            flashinfer.layernorm(x[rows], weight.float(), bias.float()) if dtype == torch.bfloat16 else x[rows]
        ),
    ):
        everything = norm(slice(None))
        for first in (0, 123, 299):
            size = random.randint(1, 300 - first)
            assert torch.equal(norm(slice(first, first + 1)), everything[first : first + 1])
            assert torch.equal(norm(slice(first, first + size)), everything[first : first + size])


def test_an_option_of_a_plan_has_priority(invariant):
    """Both options decide the splits themselves: 16 keys give other bits than the splits of the mode."""
    requests = Requests("cpu", [1, 1], [5000, 300])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    q, _, _ = requests.select([0, 1])
    results = []
    for options in ({}, dict(fixed_split_size=2048 // PAGE), dict(disable_split_kv=True), dict(fixed_split_size=1)):
        wrapper.plan(*requests.paged([0, 1]), HEADS, KV_HEADS, DIM, PAGE, q_data_type=requests.dtype, **options)
        results.append(wrapper.run(q, requests.cache))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]) and not torch.equal(results[0], results[3])


def test_an_invalid_value_names_the_variable(monkeypatch):
    monkeypatch.setenv(BATCH_INVARIANT.name, "maybe")
    requests = Requests("cpu", [1], [30])
    for run in (planned_decode, prefill, plan_free):
        with pytest.raises(EnvironmentValueError, match=BATCH_INVARIANT.name):
            run(requests, [0])
