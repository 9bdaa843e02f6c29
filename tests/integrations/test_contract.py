"""Tests of the private attributes and methods of wrappers that engines use, by name."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import fast_decode_plan

from ..conftest import DEVICES
from ..support.attention_oracle import (
    Paged,
    assert_near,
    batch_attention,
    drawn,
    indptr_of,
    int32,
    variant_dtype,
    workspace,
)
from ..support.plans import plan_of

HEADS, KV_HEADS, DIM = 4, 2, 64
DTYPE = variant_dtype(DEVICES[-1])


def batch(device: str, lens: list[int], page_size: int = 1) -> tuple[Paged, torch.Tensor]:
    return Paged(lens, page_size, KV_HEADS, DIM, DTYPE, device), drawn((len(lens), HEADS, DIM), DTYPE, device)


def wanted(q: torch.Tensor, paged: Paged, **options: Any) -> torch.Tensor:
    requests = [paged.request(b) for b in range(len(paged.kv_lens))]
    return batch_attention(q, [1] * len(q), requests, **options)[0]


def decode(device: str, page_size: int = 1, graph: int = 0, **options: Any) -> Any:
    """Return a wrapper. ``graph`` > 0: it has buffers for CUDA graphs of so many requests."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (graph + 1, 500, graph)] if graph else []
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", bool(graph), True, *buffers)


def test_options_of_the_last_plan(device):
    paged, q = batch(device, [5, 9])
    wrapper = decode(device)
    options: dict[str, Any] = dict(window_left=3, logits_soft_cap=20.0, sm_scale=0.17)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE, **options)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (3, 20.0, 0.17)
    assert wrapper._pos_encoding_mode == "NONE"
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._causal) == (-1, 0.0, False)
    wrapper.forward(q, paged.cache, sm_scale=0.25, window_left=2)
    assert (wrapper._window_left, wrapper._sm_scale) == (2, 0.25)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(int32([0, 2]), int32([0, 5]), HEADS, KV_HEADS, DIM, causal=True, q_data_type=DTYPE, sm_scale=0.5)
    assert (ragged._causal, ragged._sm_scale, ragged._window_left, ragged._logits_soft_cap) == (True, 0.5, -1, 0.0)


def test_names_before_and_after_a_plan(device):
    wrapper = decode(device)
    assert wrapper._cached_module is None and wrapper._plan_info is None and wrapper._kv_lens_buffer is None
    assert wrapper._fixed_batch_size == 0 and wrapper._jit_module is None and wrapper._backend == "auto"
    assert wrapper._float_workspace_buffer.device.type == wrapper._int_workspace_buffer.device.type == device
    assert wrapper._pin_memory_int_workspace_buffer.device.type == "cpu"
    paged, _ = batch(device, [5, 9], 4)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=DTYPE)
    assert wrapper._paged_kv_indptr_buf.tolist() == paged.indptr.tolist()
    assert wrapper._paged_kv_indices_buf.tolist() == paged.indices.tolist()
    assert wrapper._paged_kv_last_page_len_buf.tolist() == paged.last_page_len.tolist()
    assert wrapper._kv_lens_buffer.tolist() == [5, 9] and isinstance(wrapper._plan_info, list)
    assert callable(wrapper._cached_module.plan)
    wrapper.engines_may_add_their_own = True


def test_names_of_graphs(device):
    wrapper = decode(device, graph=2)
    assert wrapper._fixed_batch_size == 2 and wrapper._max_total_num_rows is None
    buffers = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
    paged, _ = batch(device, [5, 9])
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE)
    after = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
    assert all(one is other for one, other in zip(buffers, after, strict=True)) and wrapper._max_total_num_rows == 2
    sizes = dict(qo_indptr_buf=3, paged_kv_indptr_buf=3, paged_kv_indices_buf=99, paged_kv_last_page_len_buf=2)
    tables = {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes.items()}
    masks = dict(
        custom_mask_buf=torch.zeros(64, dtype=torch.uint8, device=device),
        mask_indptr_buf=torch.zeros(3, dtype=torch.int32, device=device),
    )
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, backend="fa2", **tables, **masks
    )
    for name, buffer in (tables | masks).items():
        assert getattr(prefill, f"_{name}") is buffer
    assert prefill._backend == "fa2" and prefill._fixed_batch_size == 2


@pytest.mark.parametrize("form", ["tensor cores", "other cores", "20 arguments"])
@pytest.mark.parametrize(("graph", "page_size"), [(0, 1), (3, 1), (0, 4), (3, 4)])
def test_planning_by_the_cached_module(form, graph, page_size, device):
    """SGLang plans once with begin_forward(). Then its own function writes tables into the wrapper's buffers."""
    wrapper = decode(device, page_size, graph)
    first, _ = batch(device, [4, 8, 30], page_size)
    wrapper.begin_forward(*first.tables_on("cpu"), HEADS, KV_HEADS, DIM, page_size, data_type=DTYPE, q_data_type=DTYPE)
    for _ in range(3):
        paged, q = batch(device, [random.randint(1, 100) for _ in range(3)], page_size)
        indptr, indices, last = paged.tables_on(device)
        if graph:
            wrapper._paged_kv_indptr_buf.copy_(indptr)
            wrapper._paged_kv_indices_buf[: len(indices)] = indices
            wrapper._paged_kv_last_page_len_buf.copy_(last)
        else:
            wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = indptr, indices
            wrapper._paged_kv_last_page_len_buf = last
        spaces = (
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        )  # fmt: skip
        sizes = 3, HEADS, KV_HEADS, page_size, wrapper.is_cuda_graph_enabled
        if form == "other cores":
            empty = torch.empty(0, dtype=DTYPE, device=device)
            more = (paged.indptr, *sizes, -1, 0.0, DIM, DIM, empty, empty)
        else:
            more = (int32(range(4)), paged.indptr, int32(paged.kv_lens), 3, *sizes, DIM, DIM, False)
            more += (-1, -1, False, 0, 0) if form == "20 arguments" else ()
        wrapper._plan_info = wrapper._cached_module.plan(*spaces, *more)
        for options in (dict(sm_scale=0.2), dict(sm_scale=0.1, logits_soft_cap=30.0, window_left=5)):
            assert_near(wrapper.forward(q, paged.cache, **options), wanted(q, paged, **options))


def test_errors_of_the_cached_module(device):
    wrapper = decode(device)
    paged, _ = batch(device, [5, 9])
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE)
    spaces = (None, None, None)
    good = (int32([0, 1, 2]), paged.indptr, int32([5, 9]), 2, 2, HEADS, KV_HEADS, 1, False, DIM, DIM, False)
    wrapper._cached_module.plan(*spaces, *good)
    for error, message, args in (
        (TypeError, "_cached_module.plan: got 9 arguments, wanted 15 to 20", good[:6]),
        (ValueError, "heads, page_size and head_dims: got", (*good[:5], 8, *good[6:])),
        (ValueError, "kv_indptr: got 2 elements, wanted 3", (good[0], int32([0, 3]), *good[2:])),
    ):
        with pytest.raises(error, match=message):
            wrapper._cached_module.plan(*spaces, *args)


@pytest.mark.parametrize("method", ["begin_forward", "plan"])
@pytest.mark.parametrize("graph", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_fast_decode_plan(graph, page_size, method, device):
    """Engines install it as a method of the wrapper, with tables on the device and indptr on the host."""
    wrapper = decode(device, page_size, graph)
    first, _ = batch(device, [4, 8, 30], page_size)
    wrapper.plan(*first.tables_on("cpu"), HEADS, KV_HEADS, DIM, page_size, q_data_type=DTYPE)
    setattr(wrapper, method, partial(fast_decode_plan, wrapper))
    assert getattr(wrapper, method).func is fast_decode_plan
    for _ in range(2):
        paged, q = batch(device, [random.randint(1, 100) for _ in range(3)], page_size)
        indptr, indices, last = paged.tables_on(device)
        if graph:  # an engine's kernel writes into the buffer; indices are the whole buffer
            wrapper._paged_kv_indices_buf[: len(indices)] = indices
            indices = wrapper._paged_kv_indices_buf
        getattr(wrapper, method)(
            indptr, indices, last, HEADS, KV_HEADS, DIM, page_size, data_type=DTYPE, q_data_type=DTYPE,
            non_blocking=True, fixed_split_size=None, disable_split_kv=False,
            global_override_indptr_cpu=paged.indptr.clone(),
        )  # fmt: skip
        assert_near(wrapper.run(q, paged.cache), wanted(q, paged))


def test_fast_decode_plan_is_one_object():
    assert flashinfer.fast_decode_plan is fast_decode_plan
    names = list(inspect.signature(fast_decode_plan).parameters)
    assert names[-4:] == ["fixed_split_size", "disable_split_kv", "q_len_per_req", "global_override_indptr_cpu"]


def test_one_query_of_each_request(device):
    """Engines pass q_len_per_req=1 with every plan. tests/decode/test_decode_queries.py has more queries."""
    wrapper, (paged, q) = decode(device), batch(device, [5, 9])
    arguments = (*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1)
    wrapper.plan(*arguments, q_data_type=DTYPE, q_len_per_req=1)
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged))
    fast_decode_plan(wrapper, *arguments, q_data_type=DTYPE, q_len_per_req=1)
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged))
    for plan in (wrapper.plan, partial(fast_decode_plan, wrapper)):
        with pytest.raises(TypeError, match="plan: q_len_per_req: got 1.0, wanted an integer"):
            plan(*arguments, q_data_type=DTYPE, q_len_per_req=1.0)
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged))


@pytest.mark.parametrize("graph", [0, 2])
def test_the_output_keeps_its_dtype(graph, device):
    """fast_decode_plan() has no o_data_type. It keeps the dtype of the last plan."""
    wrapper, paged = decode(device, graph=graph), Paged([5, 9], 1, KV_HEADS, DIM, torch.float16, device)
    arguments = (*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1)
    wrapper.plan(*arguments, q_data_type=torch.float16, o_data_type=torch.bfloat16)
    fast_decode_plan(wrapper, *arguments, q_data_type=torch.float16)
    q = drawn((2, HEADS, DIM), torch.float16, device)
    out = wrapper.run(q, paged.cache)
    assert out.dtype == torch.bfloat16
    assert_near(out, wanted(q, paged))
    fast_decode_plan(wrapper, *arguments, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    assert plan_of(wrapper).shape.dtype_o == torch.bfloat16
    fast_decode_plan(wrapper, *arguments, q_data_type=torch.float16)
    assert plan_of(wrapper).shape.dtype_o == torch.float16, "the last plan was for other queries"


# SegmentGEMMWrapper has no plan.
PLANNED = [name for name in flashinfer._names() if name.endswith("Wrapper") and name != "SegmentGEMMWrapper"]


@pytest.mark.parametrize("name", [*PLANNED, "BatchAttention"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda copied: copied.__name__)
def test_copies_are_refused(name, copied):
    """A copy would use and overwrite the plan of the original. No constructor is needed to see it."""
    kind = getattr(flashinfer, name)
    with pytest.raises(TypeError, match=f"{kind.__name__}: got a copy of a wrapper, wanted a new wrapper"):
        copied(object.__new__(kind))


def test_wrappers_may_share_the_workspace_of_plans(device):
    one, other = decode(device), decode(device)
    other._int_workspace_buffer = one._int_workspace_buffer
    assert other._int_workspace_buffer.data_ptr() == one._int_workspace_buffer.data_ptr()
    for wrapper in (one, other, one):
        paged, q = batch(device, [random.randint(1, 60) for _ in range(3)])
        wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE)
        assert_near(wrapper.run(q, paged.cache), wanted(q, paged))


# Results of a request do not depend on the batch


@pytest.mark.parametrize("cut", [dict(fixed_split_size=4), dict(disable_split_kv=True)], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_results_do_not_depend_on_the_batch(kind, cut, device):
    page_size, kv_len, qo_len = 16, 1500, 1 if kind == "decode" else 37
    q = drawn((qo_len, HEADS, DIM), DTYPE, device)
    k, v = (torch.randn(kv_len, KV_HEADS, DIM) for _ in range(2))
    results = []
    for others in ([], [3], [700, 40, 2000], [900] * 20):
        place = random.randint(0, len(others))
        lens = [*others[:place], kv_len, *others[place:]]
        qo_lens = [1 if kind == "decode" else random.randint(1, min(n, 300)) for n in lens]
        qo_lens[place] = qo_len
        paged = Paged(lens, page_size, KV_HEADS, DIM, DTYPE, device)
        cache = paged.cache
        for x, rows in ((0, k), (1, v)):
            pages = torch.tensor(paged.tables[place])
            padded = torch.zeros(len(pages) * page_size, KV_HEADS, DIM)
            padded[:kv_len] = rows
            cache[pages.to(device), x] = padded.view(-1, page_size, KV_HEADS, DIM).to(DTYPE).to(device)
        queries = drawn((sum(qo_lens), HEADS, DIM), DTYPE, device)
        start = sum(qo_lens[:place])
        queries[start : start + qo_len] = q
        common = dict(q_data_type=DTYPE, seq_lens=int32(lens), **cut)
        if kind == "decode":
            wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
            wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, page_size, **common)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
            tables = indptr_of(qo_lens), *paged.tables_on("cpu")
            wrapper.plan(*tables, HEADS, KV_HEADS, DIM, page_size, causal=True, **common)
        results.append(wrapper.run(queries, cache)[start : start + qo_len])
    want, _ = batch_attention(q, [qo_len], [(k.to(DTYPE), v.to(DTYPE))], causal=kind == "prefill")
    assert_near(results[0], want)
    for one in results[1:]:
        assert torch.equal(one, results[0])


def test_planning_prefill_by_the_cached_module(device):
    """SGLang 0.5.23 verifies drafts in this way: it writes a graph's buffers, then calls the planner with 20 arguments."""
    sizes = dict(qo_indptr_buf=3, paged_kv_indptr_buf=3, paged_kv_indices_buf=300, paged_kv_last_page_len_buf=2)
    tables = {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes.items()}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=True, backend="fa2", **tables
    )
    for step in range(3):
        kv_lens, qo_lens = [random.randint(4, 120) for _ in range(2)], [4, 4]
        paged = Paged(kv_lens, 1, KV_HEADS, DIM, DTYPE, device)
        q = drawn((8, HEADS, DIM), DTYPE, device)
        if step == 0:
            wrapper.begin_forward(
                indptr_of(qo_lens), *paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, causal=True, q_data_type=DTYPE
            )
        else:
            indptr, indices, last = paged.tables_on(device)
            wrapper._qo_indptr_buf.copy_(indptr_of(qo_lens))
            wrapper._paged_kv_indptr_buf.copy_(indptr)
            wrapper._paged_kv_last_page_len_buf.copy_(last)
            wrapper._paged_kv_indices_buf[: len(indices)].copy_(indices)
            wrapper._plan_info = wrapper._cached_module.plan(
                wrapper._float_workspace_buffer, wrapper._int_workspace_buffer,
                wrapper._pin_memory_int_workspace_buffer, indptr_of(qo_lens), paged.indptr, int32(kv_lens),
                wrapper._max_total_num_rows or 8, 2, HEADS, KV_HEADS, 1, True, DIM, DIM, True, -1, -1, False, 0, 0,
            )  # fmt: skip
        want, _ = batch_attention(q, qo_lens, [paged.request(b) for b in range(2)], causal=True, sm_scale=0.2)
        assert_near(wrapper.forward(q, paged.cache, causal=True, sm_scale=0.2), want)
