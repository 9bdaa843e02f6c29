"""Plans in a row: their cost on the host, their room in captured graphs, and runs after each of them."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, workspace

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SHAPE = (HEADS, KV_HEADS, DIM, PAGE)


def python_calls(call: Callable[[], object]) -> int:
    """Return the number of Python functions that a call enters, finalizers of earlier garbage not counted."""
    count, before = 0, sys.getprofile()

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def plan_of(kind: str, batch: int, device: str) -> Callable[[], None]:
    """Return a plan of a batch with tables on the host."""
    pages = [random.randrange(1, 9) for _ in range(batch)]
    indptr, indices = indptr_of(pages), int32(list(range(sum(pages))))
    last = int32([random.randrange(1, PAGE + 1) for _ in range(batch)])
    if kind == "decode":
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        return lambda: decode.plan(indptr, indices, last, *SHAPE)
    if kind == "fast decode":
        buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, len(indices), batch)]
        graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
        graph.plan(indptr, indices, last, *SHAPE)
        return lambda: flashinfer.fast_decode_plan(
            graph, buffers[0], buffers[1], last, *SHAPE, global_override_indptr_cpu=indptr
        )
    if kind == "paged prefill":
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        return lambda: paged.plan(indptr, indptr, indices, last, *SHAPE, causal=True)
    if kind == "ragged prefill":
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        return lambda: ragged.plan(indptr, indptr, *SHAPE[:3], causal=True)
    lens = int32([(n - 1) * PAGE for n in pages]) + last
    mla, sizes = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device)), (16, 512, 64, PAGE, True, 0.1)
    one_each = torch.arange(batch + 1, dtype=torch.int32)
    return lambda: mla.plan(one_each, indptr, indices, lens, *sizes, torch.float16, torch.float16)


class Dispatches(TorchDispatchMode):
    """Names of the torch operators that a call dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **kwargs or {})


# The most Python calls and torch operators of a plan with tables on the host. A GPU needs a few more: streams, copies.
MOST = {
    "decode": (56, 8),
    "fast decode": (68, 14),
    "paged prefill": (63, 10),
    "ragged prefill": (60, 10),
    "mla": (56, 8),
}


@pytest.mark.parametrize("kind", MOST)
def test_a_plan_makes_few_calls_whatever_the_batch(kind, device):
    most, operators = MOST[kind]
    if device != "cpu":
        most, operators = most + 15, operators + 2
    counts, names = [], Dispatches()
    for batch in (1, 64):
        plan = plan_of(kind, batch, device)
        plan(), plan()
        counts.append(python_calls(plan))
    with names:
        plan()
    assert counts[0] == counts[1] and counts[0] <= most, counts
    assert len(names.names) <= operators, names.names


@pytest.mark.parametrize("far", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("first", [0, 2])
def test_one_copy_brings_lists_and_tables(first, far, device):
    """Tables follow the lists in one memory, from any first offset, and are the caller's values."""
    batch = random.randrange(1, 40)
    indptr = first + indptr_of([random.randrange(0, 9) for _ in range(batch)])
    used = int(indptr[-1])
    indices, last = torch.randperm(used + 5).int(), torch.full((batch,), PAGE, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wanted = indptr.clone(), indices[:used].clone()
    placed = indices.to(device) if far else indices
    for _ in range(3):
        wrapper.plan(indptr, placed, last, *SHAPE)
    got = wrapper._planned.requests.batch.kv_indptr, wrapper._planned.requests.batch.kv_indices
    indptr.fill_(-7), placed.fill_(-7)
    for have, want in zip(got, wanted, strict=True):
        assert have.device.type == device and torch.equal(have.cpu(), want)
    lists = wrapper._planned.lists.plan
    assert got[0].data_ptr() == lists.data_ptr() + 4 * lists.numel() and lists.data_ptr() % 32 == 0
    if device == "cpu" or not far:
        assert got[1].data_ptr() == got[0].data_ptr() + 4 * (batch + 1)


def test_a_plan_of_other_options_follows_each_plan(device):
    """forward() makes lists again from the tables of the last plan, which are in the memory of its lists."""
    lens = [300, 5, 77]
    paged = Paged(lens, PAGE, KV_HEADS, DIM, torch.float16, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    q = drawn((3, HEADS, DIM), torch.float16, device)
    for _ in range(3):
        wrapper.plan(*paged.tables_on("cpu"), *SHAPE, window_left=8)
        for window in (8, -1, 40):
            want, _ = batch_attention(q, [1] * 3, [paged.request(b) for b in range(3)], window_left=window)
            assert_near(wrapper.forward(q, paged.cache, window_left=window), want)


def test_a_graph_has_room_for_rows_before_the_first_request(device):
    """The first plan fixes the number of queries. A later plan of as many may give all of them to requests."""
    rows, count = 600, 2
    paged = Paged([700, 700], PAGE, KV_HEADS, DIM, torch.float16, device)
    sizes = (count + 1, count + 1, 400, count)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    wrapper.plan(int32([rows - 2, rows - 1, rows]), *paged.tables_on("cpu"), *SHAPE, causal=True)
    lens = [rows - 1, 1]
    wrapper.plan(indptr_of(lens), *paged.tables_on("cpu"), *SHAPE, causal=True)
    q = drawn((rows, HEADS, DIM), torch.float16, device)
    want = batch_attention(q, lens, [paged.request(b) for b in range(count)], causal=True)
    got = wrapper.run(q, paged.cache, return_lse=True)
    assert_near(got[0], want[0], got[1], want[1])


@pytest.mark.parametrize("graph", [False, True])
def test_runs_follow_the_last_plan(graph, device):
    """Eager calls of one handle take the tables of each plan, of options that alternate."""
    count = 3
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (count + 1, count + 1, 400, count)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", graph, *(buffers if graph else ())
    )
    handles = set()
    for turn in range(6):
        batch = count if graph else random.randrange(1, 6)
        kv_lens = [random.choice([0, 1, 9, 40, 300]) for _ in range(batch)]
        qo_lens = [6, 1, 2] if graph else [random.randrange(1, 7) for _ in range(batch)]
        causal = turn % 3 == 1
        paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, torch.float16, device)
        wrapper.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), *SHAPE, causal=causal)
        handles.add(wrapper._bound._handle)
        q = drawn((sum(qo_lens), HEADS, DIM), torch.float16, device)
        want = batch_attention(q, qo_lens, [paged.request(b) for b in range(batch)], causal=causal)
        out, lse = torch.full_like(q, 77), torch.full(q.shape[:2], 55.0, device=device)
        for _ in range(2):
            wrapper.run(q, paged.cache, out=out, lse=lse, return_lse=True)
            assert_near(out, want[0], lse, want[1])
    assert len(handles) == 2, "one for each option"


@pytest.mark.parametrize("wrong", ["falls", "page", "last page", "short"])
def test_a_plan_that_fails_leaves_the_last_one(wrong, device):
    paged = Paged([9, 30], PAGE, KV_HEADS, DIM, torch.float16, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    indptr, indices, last = paged.tables_on("cpu")
    wrapper.plan(indptr, indices, last, *SHAPE)
    q = drawn((2, HEADS, DIM), torch.float16, device)
    want = batch_attention(q, [1, 1], [paged.request(b) for b in range(2)])
    bad = {
        "falls": (indptr.flip(0), indices, last),
        "page": (indptr, indices - 1000, last),
        "last page": (indptr, indices, last + PAGE),
        "short": (indptr, indices[:-1], last),
    }[wrong]
    name = {"falls": "indptr", "last page": r"last_page_len\[\d\]"}.get(wrong, "indices")
    with pytest.raises(ValueError, match=rf"^BatchDecodeWithPagedKVCacheWrapper.plan: {name}: got "):
        wrapper.plan(*bad, *SHAPE)
    assert_near(wrapper.run(q, paged.cache), want[0])


def test_pages_of_more_keys_than_int32_counts(device):
    wrapper = flashinfer.mla.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
    tables = int32([0, 5]), int32([0, 1, 2, 3, 4]), int32([3])
    with pytest.raises(ValueError, match=r"plan: .*last_page_len: got 4294967299 keys of a request"):
        wrapper.plan(*tables, 16, 512, 1 << 30, 0.1)
