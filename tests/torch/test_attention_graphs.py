"""Tests of workspaces and of buffers for CUDA graphs: one captured run serves every plan that fits."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer
from tests.support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, workspace

from ..support.plans import scheduler_of

PLACE = (torch.float16, 64)


@pytest.fixture
def small(device):
    """Return arguments of modules that other tests also use."""
    return (device, *PLACE)


def wanted(q: torch.Tensor, paged: Paged, **options):
    requests = [paged.request(b) for b in range(len(q))]
    return batch_attention(q, [1] * len(q), requests, **options)


# CUDA graphs. On a CPU, everything except the capture is tested.


class Graphed:
    """A decode wrapper with its buffers, and a run that a GPU captures."""

    def __init__(self, place, batch: int, pages: int, heads: tuple[int, int], wrapper=None) -> None:
        self.place, self.heads = place, heads
        device, dtype, head_dim = place
        self.buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, pages, batch)]
        wrapper = wrapper or flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        self.wrapper = wrapper(workspace(device), *self.buffers)
        self.q = torch.zeros(batch, heads[0], head_dim, dtype=dtype, device=device)
        self.cache = torch.zeros(pages + 2, 2, 16, heads[1], head_dim, dtype=dtype, device=device)
        self.out = torch.zeros_like(self.q)
        self.graph = None

    def plan(self, paged: Paged, **options) -> None:
        tables = paged.tables_on(random.choice(["cpu", self.place[0]]))
        self.wrapper.plan(*tables, *self.heads, self.place[2], 16, q_data_type=self.place[1], **options)
        self.cache[: len(paged.k)] = paged.cache

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        self.q.copy_(q)
        self.out.fill_(math.nan)
        if self.place[0] == "cpu":
            self.wrapper.run(self.q, self.cache, out=self.out)
        elif self.graph is None:
            self.wrapper.run(self.q, self.cache, out=self.out)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.wrapper.run(self.q, self.cache, out=self.out)
        if self.graph is not None:
            self.out.fill_(math.nan)
            self.graph.replay()
        return self.out


def test_one_graph_serves_every_plan(small):
    device, dtype, head_dim = small
    graphed = Graphed(small, 5, 400, (8, 2))
    assert graphed.wrapper.is_cuda_graph_enabled
    reserved = []
    for change in range(50):
        longest = random.choice([1, 50, 300, 1200])
        lens = [random.choice([0, 1, random.randint(0, longest)]) for _ in range(5)]
        paged = Paged(lens, 16, 2, head_dim, dtype, device)
        graphed.plan(paged)
        q = drawn((5, 8, head_dim), dtype, device)
        assert_near(graphed(q), wanted(q, paged)[0])
        if device == "cuda" and change >= 10:
            del paged, q
            reserved.append(torch.cuda.memory_allocated())
    assert not reserved or reserved[-1] <= min(reserved) + (1 << 20), "memory grows"


class GraphedPrefill:
    """A prefill wrapper with its buffers, and a run that a GPU captures."""

    def __init__(self, place, batch: int, queries: int, pages: int, paged: bool, masked: bool) -> None:
        self.place, self.paged, self.masked = place, paged, masked
        device, dtype, head_dim = place
        ints = lambda n: torch.zeros(n, dtype=torch.int32, device=device)  # noqa: E731
        self.masks = (
            [torch.zeros(1 << 16, dtype=torch.uint8, device=device), ints(batch + 1)] if masked else [None, None]
        )
        if paged:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(device), "NHD", True, ints(batch + 1), ints(batch + 1), ints(pages), ints(batch), *self.masks
            )
            self.inputs = [torch.zeros(pages + 2, 2, 16, 2, head_dim, dtype=dtype, device=device)]
        else:
            self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace(device), "NHD", True, ints(batch + 1), ints(batch + 1), *self.masks
            )
            self.inputs = [torch.zeros(pages * 16, 2, head_dim, dtype=dtype, device=device) for _ in range(2)]
        self.q = torch.zeros(queries, 8, head_dim, dtype=dtype, device=device)
        self.out = torch.zeros_like(self.q)
        self.graph = None

    def check(self, qo_lens: list[int], kv_lens: list[int]) -> None:
        device, dtype, head_dim = self.place
        far, masks = random.choice(["cpu", device]), None
        options = dict(causal=not self.masked, q_data_type=dtype)
        if self.masked:
            masks = [torch.rand(n, m) < 0.4 for n, m in zip(qo_lens, kv_lens, strict=True)]
            options["custom_mask"] = torch.cat([mask.view(-1) for mask in masks])
        if self.paged:
            paged = Paged(kv_lens, 16, 2, head_dim, dtype, device)
            requests = [paged.request(b) for b in range(len(kv_lens))]
            self.wrapper.plan(indptr_of(qo_lens).to(far), *paged.tables_on(far), 8, 2, head_dim, 16, **options)
            self.inputs[0][: len(paged.k)] = paged.cache
        else:
            k, v = (drawn((sum(kv_lens), 2, head_dim), dtype, device) for _ in range(2))
            requests = list(zip(k.split(kv_lens), v.split(kv_lens), strict=True))
            self.wrapper.plan(indptr_of(qo_lens).to(far), indptr_of(kv_lens).to(far), 8, 2, head_dim, **options)
            for buffer, x in zip(self.inputs, (k, v), strict=True):
                buffer[: len(x)] = x
        q = drawn(self.q.shape, dtype, device)
        self.q.copy_(q)
        want, _ = batch_attention(q[: sum(qo_lens)], qo_lens, requests, masks, causal=not self.masked)
        assert_near(self()[: sum(qo_lens)], want)

    def __call__(self) -> torch.Tensor:
        self.out.fill_(math.nan)
        if self.place[0] == "cpu" or self.graph is None:
            self.wrapper.run(self.q, *self.inputs, out=self.out)
        if self.place[0] != "cpu":
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.wrapper.run(self.q, *self.inputs, out=self.out)
            self.out.fill_(math.nan)
            self.graph.replay()
        return self.out


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
def test_one_graph_of_prefill_serves_every_plan(paged, masked, small):
    graphed = GraphedPrefill(small, 4, 120, 200, paged, masked)
    graphed.check([30, 30, 30, 30], [40, 700, 60, 30])
    for _ in range(20):
        kv_lens = [random.choice([0, 1, random.randint(0, 700)]) for _ in range(4)]
        graphed.check([random.choice([0, 1, random.randint(0, 30)]) for _ in range(4)], kv_lens)


def test_a_plan_of_prefill_that_does_not_fit_a_graph(small):
    graphed = GraphedPrefill(small, 2, 40, 20, True, False)
    graphed.check([10, 20], [50, 60])
    before = graphed().clone()
    tables = Paged([50, 60], 16, 2, 64, torch.float16, small[0]).tables_on("cpu")
    for qo_lens, options, message in (
        ([10, 21], {}, "qo_indptr: got 31 queries, wanted at most 30 as in the wrapper's first plan"),
        ([10, 20, 30], {}, "qo_indptr: got 3 requests, wanted 2 as the buffer for CUDA graphs"),
        ([1, 1], dict(custom_mask=torch.ones(110).bool()), "custom_mask_buf: got None, wanted one for a custom_mask"),
    ):
        with pytest.raises(ValueError, match=message):
            graphed.wrapper.plan(indptr_of(qo_lens), *tables, 8, 2, 64, 16, **options)
    assert torch.equal(graphed()[:30], before[:30]), "a plan that failed changed something"
    masked = GraphedPrefill(small, 1, 1000, 100, False, True)
    with pytest.raises(
        ValueError, match="custom_mask: got 125000 elements, wanted at most 65536, the size of its buffer"
    ):
        masked.check([1000], [1000])


def test_a_plan_that_does_not_fit_a_graph(small):
    device, dtype, head_dim = small
    graphed = Graphed(small, 2, 10, (8, 2))
    graphed.plan(Paged([30, 100], 16, 2, head_dim, dtype, device))
    q = drawn((2, 8, head_dim), dtype, device)
    before = graphed(q).clone()
    with pytest.raises(ValueError, match="indices: got 11 elements, wanted at most 10, the size of its buffer"):
        graphed.wrapper.plan(*Paged([16, 160], 16, 2, head_dim, dtype, device).tables_on("cpu"), 8, 2, head_dim, 16)
    with pytest.raises(ValueError, match="indptr: got 3 requests, wanted 2 as the buffer for CUDA graphs"):
        graphed.wrapper.plan(*Paged([1, 2, 3], 16, 2, head_dim, dtype, device).tables_on("cpu"), 8, 2, head_dim, 16)
    assert torch.equal(graphed(q), before), "a plan that failed changed something"


@pytest.mark.parametrize(
    "smaller, message",
    [
        (dict(max_items=1), r"got \d+ work items and \d+ merges, and the buffers of this wrapper hold 1 and \d+"),
        (dict(max_merges=0, max_items=1), "buffers of this wrapper hold 1 and 0"),
        (
            dict(max_slots=1),
            r"float_workspace_buffer: got \d+ partial results, wanted at most 1 as in the wrapper's first plan",
        ),
    ],
)
def test_a_graph_that_was_captured_with_less(smaller, message, small):
    """No lengths of requests cause this error. A changed limit of the kernels would."""
    device, dtype, head_dim = small
    graphed, paged = Graphed(small, 2, 400, (4, 1)), Paged([3000, 2000], 16, 1, head_dim, dtype, device)
    graphed.plan(paged)
    scheduler = scheduler_of(graphed.wrapper)
    scheduler.graph_sizes = scheduler.graph_sizes._replace(**smaller)
    with pytest.raises(ValueError, match=message):
        graphed.plan(paged)


def test_bad_graph_buffers(device):
    def build(**change):
        sizes = dict(indptr=3, indices=10, last_page_len=2)
        buffers = {
            f"paged_kv_{n}_buffer": torch.zeros(size, dtype=torch.int32, device=device) for n, size in sizes.items()
        }
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **buffers | change)

    build()
    with pytest.raises(TypeError, match="paged_kv_indptr_buffer: got NoneType, wanted Tensor"):
        build(paged_kv_indptr_buffer=None)
    with pytest.raises(TypeError, match=r"paged_kv_indices_buffer: got torch\.int64, wanted torch\.int32"):
        build(paged_kv_indices_buffer=torch.zeros(10, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=f"paged_kv_indices_buffer: got a tensor on meta, wanted one on {device}"):
        build(paged_kv_indices_buffer=torch.zeros(10, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="paged_kv_last_page_len_buffer: got 5 elements, wanted 2"):
        build(paged_kv_last_page_len_buffer=torch.zeros(5, dtype=torch.int32, device=device))


# Workspaces


def test_workspaces(small):
    device, dtype, head_dim = small
    paged = Paged([4000, 1], 16, 1, head_dim, dtype, device)
    q, tables = drawn((2, 4, head_dim), dtype, device), paged.tables_on("cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(256, dtype=torch.uint8, device=device))
    plan = lambda: wrapper.plan(*tables, 4, 1, head_dim, 16, q_data_type=dtype)  # noqa: E731
    with pytest.raises(ValueError, match=r"float_workspace_buffer: got 256 bytes, wanted at least \d+"):
        plan()
    with pytest.raises(ValueError, match=r"run: got no plan, wanted a call of plan\(\) before"):
        wrapper.run(q, paged.cache)
    ints = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    wrapper.reset_workspace_buffer(workspace(device), ints[:64])
    with pytest.raises(ValueError, match=r"int_workspace_buffer: got 64 bytes, wanted at least \d+"):
        plan()
    wrapper.reset_workspace_buffer(workspace(device).view(torch.float32), ints)
    plan()
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged)[0])
    wrapper.reset_workspace_buffer(workspace(device), ints)
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.run(q, paged.cache)
    with pytest.raises(ValueError, match="float_workspace_buffer: wanted a contiguous tensor"):
        wrapper.reset_workspace_buffer(workspace(device)[::2], ints)
    with pytest.raises(ValueError, match="float_workspace_buffer: wanted .* that starts at a multiple of 32 bytes"):
        wrapper.reset_workspace_buffer(workspace(device)[4:], ints)
    with pytest.raises(ValueError, match=f"int_workspace_buffer: got a tensor on meta, wanted one on {device}"):
        wrapper.reset_workspace_buffer(workspace(device), workspace("meta"))
    with pytest.raises(TypeError, match="int_workspace_buffer: got list, wanted Tensor"):
        wrapper.reset_workspace_buffer(workspace(device), [])
    with pytest.raises(ValueError, match="float_workspace_buffer: got a tensor on meta"):
        wrapper.reset_workspace_buffer(workspace("meta"), ints)
    with pytest.raises(TypeError, match="float_workspace_buffer: got int, wanted Tensor"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(3)
    with pytest.raises(ValueError, match="kv_layout: got 'NDH', wanted 'NHD' or 'HND'"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NDH")
    assert wrapper.end_forward() is None and not wrapper.use_tensor_cores and not wrapper.is_cuda_graph_enabled
