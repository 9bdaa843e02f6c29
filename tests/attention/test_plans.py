"""Plans in a row: their cost on the host, their room in captured graphs, and runs after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import flashinfer
from flashinfer._attention.bound import Bound

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, workspace
from ..support.plans import bound_calls, scheduler_of
from ..support.profile import files_of_calls

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SHAPE = (HEADS, KV_HEADS, DIM, PAGE)


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


# The most Python calls of a repeated plan with tables on the host. A GPU needs more: checks of captures and streams.
MOST_CALLS = {"decode": 54, "fast decode": 56, "paged prefill": 62, "ragged prefill": 60, "mla": 35}


@pytest.mark.parametrize("kind", MOST_CALLS)
def test_calls_of_a_plan_do_not_depend_on_the_batch(kind, device):
    counts = []
    for batch in (1, 64):
        plan = plan_of(kind, batch, device)
        plan(), plan()
        counts.append(len(files_of_calls(plan)))
    most = MOST_CALLS[kind] + (0 if device == "cpu" else 12)
    assert counts[0] == counts[1] and counts[0] <= most, counts


def test_a_plan_of_a_captured_graph_rebinds_nothing(device, monkeypatch):
    """Bound calls read each plan of the same sizes from the same memory."""
    paged = Paged([300, 5, 77], PAGE, KV_HEADS, DIM, torch.float16, device)
    count = len(paged.kv_lens)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (count + 1, paged.indices.numel(), count)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    rebound: list[object] = []
    rebind = Bound.rebind
    monkeypatch.setattr(Bound, "rebind", lambda self, *args: (rebound.append(args), rebind(self, *args)))
    q = drawn((count, HEADS, DIM), torch.float16, device)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        tables = [paged.tables[b] for b in order]
        indptr, last = indptr_of([len(table) for table in tables]), paged.last_page_len[order]
        buffers[1].copy_(int32([page for table in tables for page in table]))
        flashinfer.fast_decode_plan(wrapper, indptr, buffers[1], last, *SHAPE)
        got = wrapper.run(q, paged.cache, return_lse=True)
        want = batch_attention(q, [1] * count, [paged.request(b) for b in order])
        assert_near(got[0], want[0], got[1], want[1])
        assert not rebound
    wrapper.reset_workspace_buffer(workspace(device), torch.empty(1 << 20, dtype=torch.uint8, device=device))
    flashinfer.fast_decode_plan(wrapper, indptr, buffers[1], last, *SHAPE)
    assert_near(wrapper.run(q, paged.cache), want[0])  # from other memory


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
        handles.add(bound_calls(wrapper)._handle)
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


@pytest.mark.parametrize(
    "change",
    [dict(num_qo_heads=8.0), dict(page_size=None), dict(window_left=-1.0), dict(fixed_split_size=2.0)],
    ids=str,
)
def test_an_equal_number_of_another_type_is_checked_again(change, device):
    """Checked arguments are cached: 8.0 == 8, and only one of them is a number of heads."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = Paged([40], 16, 2, 64, torch.float16, device).tables_on("cpu")
    given = dict(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, page_size=16, window_left=-1, fixed_split_size=2)
    wrapper.plan(indptr_of([3]), *tables, **given)
    (name,) = change
    with pytest.raises(
        TypeError, match=rf"^BatchPrefillWithPagedKVCacheWrapper.plan: {name}: got .*, wanted an integer$"
    ):
        wrapper.plan(indptr_of([3]), *tables, **(given | change))


@pytest.mark.parametrize("place", ["workspace", "no room", "pages on the device"])
def test_tables_follow_the_lists_if_there_is_room(place, device):
    """The caller's tables change after the plan. Larger and smaller batches alternate."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    if place == "no room":
        ints = torch.empty(1 << 11, dtype=torch.int32, device=device)
        wrapper.reset_workspace_buffer(workspace(device), ints)
    for kv_lens in ([3000, 4000, 2201], [5], [2000, 0, 1, 6000]):
        paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, torch.float16, device)
        indptr, indices, last = paged.tables_on("cpu")
        if place == "pages on the device":
            indices = indices.to(device)
        wrapper.plan(indptr, indices, last, *SHAPE, disable_split_kv=True)
        in_workspace = [
            table.untyped_storage().data_ptr() == scheduler_of(wrapper).int_workspace.untyped_storage().data_ptr()
            for table in (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf)
        ]
        fits = place != "no room" or len(kv_lens) == 1
        assert in_workspace == [fits, fits and (place == "workspace" or indices.is_cpu)]
        q = drawn((len(kv_lens), HEADS, DIM), torch.float16, device)
        want = batch_attention(q, [1] * len(kv_lens), [paged.request(b) for b in range(len(kv_lens))])
        indptr.fill_(-7), last.fill_(-7)
        if indices.is_cpu:
            indices.fill_(-7)
        got = wrapper.run(q, paged.cache, return_lse=True)
        assert_near(got[0], want[0], got[1], want[1])


def test_wider_options_keep_the_tables(device):
    """A run that sees more keys than the plan makes longer lists, which do not overwrite the tables."""
    kv_lens = [900, 1, 2500, 40]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, torch.float16, device)
    wrapper.plan(*paged.tables_on("cpu"), *SHAPE, window_left=2)
    q = drawn((len(kv_lens), HEADS, DIM), torch.float16, device)
    for window in (2, -1, 2, 300):
        want = batch_attention(
            q, [1] * len(kv_lens), [paged.request(b) for b in range(len(kv_lens))], window_left=window
        )
        for _ in range(2):
            got = wrapper.forward(q, paged.cache, window_left=window, return_lse=True)
            assert_near(got[0], want[0], got[1], want[1])
