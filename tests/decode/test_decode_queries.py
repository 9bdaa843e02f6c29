"""Decode with several queries of each request, as in speculative decoding: values against float64."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import fast_decode_plan
from flashinfer.errors import UnsupportedError

from ..conftest import DEVICES
from ..support.attention_oracle import (
    FLOAT8_CASES,
    Paged,
    assert_near,
    batch_attention,
    drawn,
    int32,
    variant_dtype,
    workspace,
)

HEADS, KV_HEADS, DIM = 6, 2, 64
DTYPE = torch.bfloat16 if "cuda" in DEVICES else variant_dtype("cpu")


def wrapper_of(device: str, graph: int = 0, **options: Any) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (graph + 1, 900, graph)] if graph else []
    cores = options.pop("use_tensor_cores", True)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", bool(graph), cores, *buffers, **options
    )


def drawn_batch(
    device: str, q_len: int, page_size: int, dtype: torch.dtype = DTYPE, kv_dtype: torch.dtype | None = None,
    requests: int = 4,
) -> tuple[Paged, torch.Tensor]:  # fmt: skip
    """Requests of which the first has no key before its queries."""
    lens = [q_len, *(random.randint(q_len, 150) for _ in range(requests - 1))]
    paged = Paged(lens, page_size, KV_HEADS, DIM, kv_dtype or dtype, device)
    return paged, drawn((requests * q_len, HEADS, DIM), dtype, device)


def check(result: Any, q: torch.Tensor, paged: Paged, q_len: int, **options: Any) -> None:
    requests = [paged.request(b) for b in range(len(paged.kv_lens))]
    want, want_lse = batch_attention(q, [q_len] * len(requests), requests, causal=True, **options)
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert_near(out, want, lse, want_lse if lse is not None else None)


@pytest.mark.parametrize("q_len", [2, 3, 9])
@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize(
    "options", [{}, dict(window_left=4), dict(logits_soft_cap=9.0, sm_scale=0.2), dict(pos_encoding_mode="ALIBI")],
    ids=["plain", "window", "cap", "alibi"],
)  # fmt: skip
def test_values(q_len, page_size, options, device):
    wrapper = wrapper_of(device)
    for _ in range(2):
        paged, q = drawn_batch(device, q_len, page_size)
        out, lse = torch.full_like(q, 77.0), torch.full(q.shape[:2], 77.0, device=device)
        wrapper.plan(
            *paged.tables_on(device), HEADS, KV_HEADS, DIM, page_size, q_data_type=DTYPE, q_len_per_req=q_len, **options
        )
        result = wrapper.run(q, paged.cache, out=out, lse=lse, return_lse=True, q_len_per_req=q_len)
        assert result[0] is out and result[1] is lse
        check(result, q, paged, q_len, **options)
        check(wrapper.run(q, paged.cache), q, paged, q_len, **options)


def test_sinks(device):
    (paged, q), wrapper, sinks = drawn_batch(device, 3, 4), wrapper_of(device), torch.randn(HEADS, device=device)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=DTYPE, q_len_per_req=3, window_left=20)
    check(wrapper.run(q, paged.cache, sinks=sinks, return_lse=True), q, paged, 3, sinks=sinks, window_left=20)


@pytest.mark.parametrize("kv_dtype", FLOAT8_CASES, ids=str)
def test_fp8_caches(kv_dtype, device):
    (paged, q), wrapper = drawn_batch(device, 2, 4, torch.float16, kv_dtype), wrapper_of(device)
    wrapper.plan(
        *paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=torch.float16, kv_data_type=kv_dtype,
        q_len_per_req=2,
    )  # fmt: skip
    out, lse = wrapper.run(q, paged.cache, k_scale=0.5, v_scale=2.0, return_lse=True)
    check((out / 2, lse), q, paged, 2, sm_scale=0.5 * DIM**-0.5)


def test_queries_change_from_plan_to_plan(device):
    wrapper = wrapper_of(device)
    for q_len in (1, 3, 1, 2, 2):
        paged, q = drawn_batch(device, q_len, 4)
        wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=DTYPE, q_len_per_req=q_len)
        check(wrapper.run_return_lse(q, paged.cache), q, paged, q_len)
        check(
            wrapper.forward(q, paged.cache, sm_scale=0.2, window_left=3), q, paged, q_len, sm_scale=0.2, window_left=3
        )


def test_no_requests(device):
    wrapper, paged = wrapper_of(device), Paged([], 4, KV_HEADS, DIM, DTYPE, device)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=DTYPE, q_len_per_req=3)
    assert wrapper.run(torch.empty(0, HEADS, DIM, dtype=DTYPE, device=device), paged.cache).shape == (0, HEADS, DIM)


def test_a_captured_graph_serves_other_lengths(device):
    """The buffers are those of graphs on the CPU too, where the replay is another run."""
    wrapper, q_len = wrapper_of(device, graph=4), 3
    longest = Paged([150] * 4, 4, KV_HEADS, DIM, DTYPE, device)
    cache, q = torch.empty_like(longest.cache), drawn((4 * q_len, HEADS, DIM), DTYPE, device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    cache.copy_(longest.cache)
    sizes = (HEADS, KV_HEADS, DIM, 4)
    wrapper.plan(*longest.tables_on("cpu"), *sizes, q_data_type=DTYPE, q_len_per_req=q_len)
    replay = run = partial(wrapper.run, q, cache, out=out, lse=lse, return_lse=True)
    run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    for plan in (wrapper.plan, partial(fast_decode_plan, wrapper)):
        paged, _ = drawn_batch(device, q_len, 4)
        cache[: len(paged.k)] = paged.cache
        q.copy_(torch.randn(q.shape))
        out.fill_(77)
        plan(*paged.tables_on("cpu"), *sizes, q_data_type=DTYPE, q_len_per_req=q_len)
        replay()
        check((out, lse), q, paged, q_len)
    with pytest.raises(ValueError, match="plan: q_len_per_req: got 2, wanted 3, frozen by the first plan"):
        wrapper.plan(*longest.tables_on("cpu"), *sizes, q_data_type=DTYPE, q_len_per_req=2)
    with pytest.raises(ValueError, match="plan: q_len_per_req: got 1, wanted 3, frozen by the first plan"):
        wrapper.plan(*longest.tables_on("cpu"), *sizes, q_data_type=DTYPE)
    with pytest.raises(ValueError, match="got 13 queries of q_len_per_req 3, and plan.. was called for 12"):
        wrapper.run(drawn((13, HEADS, DIM), DTYPE, device), cache)


@pytest.mark.parametrize("cores", ["tensor", "other"])
def test_planning_by_the_cached_module(cores, device):
    wrapper, (paged, _) = wrapper_of(device), drawn_batch(device, 2, 1)
    sizes = (HEADS, KV_HEADS, DIM, 1)
    wrapper.plan(*paged.tables_on("cpu"), *sizes, q_data_type=DTYPE, q_len_per_req=2)
    paged, q = drawn_batch(device, 2, 1)
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, _ = paged.tables_on(device)
    shape = (4, HEADS, KV_HEADS, 1, False)
    empty = torch.empty(0, dtype=DTYPE)
    more = (paged.indptr, *shape, -1, 0.0, DIM, DIM, empty, empty)
    if cores == "tensor":
        more = (int32(range(0, 10, 2)), paged.indptr, int32(paged.kv_lens), 8, *shape, DIM, DIM, False)
    wrapper._cached_module.plan(None, None, None, *more)
    check(wrapper.run(q, paged.cache, return_lse=True), q, paged, 2)
    if cores == "tensor":
        with pytest.raises(ValueError, match="got 2 and a request of 1 keys"):
            wrapper._cached_module.plan(None, None, None, *more[:2], int32([1, 9, 9, 9]), *more[3:])


def test_compiled(device):
    wrapper, (paged, q) = wrapper_of(device), drawn_batch(device, 3, 4)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 4, q_data_type=DTYPE, q_len_per_req=3)
    compiled = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True, backend="aot_eager")
    check(compiled(q, paged.cache), q, paged, 3)


def test_errors_leave_the_last_plan(device):
    wrapper, (paged, q) = wrapper_of(device), drawn_batch(device, 2, 1)
    rest = (HEADS, KV_HEADS, DIM, 1)
    plan, tables = partial(wrapper.plan, q_data_type=DTYPE), paged.tables_on("cpu")
    with pytest.raises(ValueError, match="fast_decode_plan: q_len_per_req: got 2 without a prior plan"):
        fast_decode_plan(wrapper, *tables, *rest, q_data_type=DTYPE, q_len_per_req=2)
    plan(*tables, *rest, q_len_per_req=2)
    short = Paged([9, 2, 3, 8], 1, KV_HEADS, DIM, DTYPE, device).tables_on("cpu")
    for error, message, q_len in (
        (ValueError, "q_len_per_req: got 3 and a request of 2 keys, .* would have an empty KV range", 3),
        (ValueError, "plan: q_len_per_req: got 0, wanted a positive number", 0),
        (TypeError, "plan: q_len_per_req: got 2.0, wanted an integer", 2.0),
    ):
        with pytest.raises(error, match=message):
            plan(*short, *rest, q_len_per_req=q_len)
        check(wrapper.run(q, paged.cache), q, paged, 2)
    for error, message, options in (
        (ValueError, "wanted 1 without use_tensor_cores=True", dict(use_tensor_cores=False)),
        (UnsupportedError, "with backend 'fa3', wanted backend 'fa2'", dict(backend="fa3")),
    ):
        with pytest.raises(error, match=f"plan: q_len_per_req: got 2.*{message}"):
            wrapper_of(device, **options).plan(*tables, *rest, q_data_type=DTYPE, q_len_per_req=2)
    for rows in (4, 12):
        with pytest.raises(ValueError, match=f"q: got {rows} queries of q_len_per_req 2, and plan.. was called for 8"):
            wrapper.run(drawn((rows, HEADS, DIM), DTYPE, device), paged.cache)
    with pytest.raises(ValueError, match="run: q_len_per_req: got 3, and plan.. was called for 2"):
        wrapper.run(q, paged.cache, q_len_per_req=3)
