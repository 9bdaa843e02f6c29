"""Decode's kernels for Hopper (backend="fa3") against float64: caches, options, splits, graphs, errors."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._attention import kernels
from flashinfer._attention.kernels import CallProperties, choose
from flashinfer.jit.modules import Matrix, family
from flashinfer.jit.modules._attention import KERNELS, attention_spec
from flashinfer.utils import is_sm90a_supported
from tests.support.attention_oracle import Paged, assert_near, batch_attention, drawn, int32, workspace

from ..support.plans import num_partial_states, plan_of, scheduler_of

BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
HERE = torch.cuda.is_available() and is_sm90a_supported(torch.device("cuda"))
hopper = pytest.mark.skipif(not HERE, reason="wanted a GPU of compute capability 9.0")
# dtype of queries, of caches, and head_dim
TYPES = [(BF16, BF16, 128), (F16, F16, 64), (F16, F16, 256), (BF16, E4M3, 128), (F16, E5M2, 64), (F16, E4M3, 256)]
OPTIONS = [
    dict(),
    dict(window_left=0),
    dict(window_left=37),
    dict(window_left=300),
    dict(sm_scale=-0.3),
    dict(logits_soft_cap=5.0),
    dict(pos_encoding_mode="ALIBI"),
]


def planned(paged: Paged, dtypes, heads: tuple[int, int], layout: str = "NHD", **options):
    q_dtype, kv_dtype, head_dim = dtypes
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"), layout, backend="fa3")
    tables = paged.tables_on("cpu")
    wrapper.plan(*tables, *heads, head_dim, paged.page_size, q_data_type=q_dtype, kv_data_type=kv_dtype, **options)
    return wrapper


def wanted(q: torch.Tensor, paged: Paged, **options):
    return batch_attention(q, [1] * len(q), [paged.request(b) for b in range(len(q))], **options)


def tickets_of(wrapper) -> torch.Tensor:
    lists = plan_of(wrapper).lists
    count = lists.max_merges * plan_of(wrapper).shape.num_kv_heads
    return lists.plan[lists.plan.numel() - count :]


def check(wrapper, paged: Paged, q: torch.Tensor, **options) -> None:
    """Check values, lse, bits of a second run, tickets reset to 0, and completely written outputs."""
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=q.device)
    wrapper.run(q, paged.cache, out=out, lse=lse)
    want, want_lse = wanted(q, paged, **options)
    assert_near(out, want, lse, want_lse)
    for _ in range(3):
        again, lse_again = wrapper.run(q, paged.cache, return_lse=True)
        assert torch.equal(again, out) and torch.equal(lse_again, lse), "the same inputs, other bits"
    assert not tickets_of(wrapper).any()


@hopper
@pytest.mark.parametrize("dtypes", TYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64])
@pytest.mark.parametrize("layout, form", [("NHD", "one"), ("HND", "pair"), ("NHD", "torn"), ("HND", "torn")])
def test_forms(layout, form, page_size, dtypes):
    q_dtype, kv_dtype, head_dim = dtypes
    lens = [0, 1, 15, 16, 17, random.randint(2, 100), random.randint(100, 500), random.randint(1000, 3000)]
    random.shuffle(lens)
    heads = random.choice([(8, 2), (7, 7), (12, 3), (32, 8), (17, 1), (40, 1)])
    paged = Paged(lens, page_size, heads[1], head_dim, kv_dtype, "cuda", layout, form, shared=random.random() < 0.5)
    check(planned(paged, dtypes, heads, layout), paged, drawn((len(lens), heads[0], head_dim), q_dtype, "cuda"))


@hopper
@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, page_size):
    paged = Paged([0, 1, 40, 333, 2900], page_size, 3, 128, BF16, "cuda")
    q = drawn((5, 12, 128), BF16, "cuda")
    check(planned(paged, TYPES[0], (12, 3), **options), paged, q, **options)


@hopper
@pytest.mark.parametrize("page_size", [1, 16])
def test_sinks_and_scales(page_size):
    paged = Paged([700, 3, 0], page_size, 1, 128, BF16, "cuda")
    q, sinks = drawn((3, 4, 128), BF16, "cuda"), torch.randn(4, device="cuda")
    wrapper = planned(paged, TYPES[0], (4, 1))
    out, lse = wrapper.run(q, paged.cache, sinks=sinks, return_lse=True)
    assert_near(out, *wanted(q, paged, sinks=sinks)[:1], lse, wanted(q, paged, sinks=sinks)[1])
    paged = Paged([700, 3, 0], page_size, 1, 128, E4M3, "cuda")
    requests = [(k * 0.25, v * 4) for k, v in (paged.request(b) for b in range(3))]
    out = planned(paged, TYPES[3], (4, 1)).run(q, paged.cache, k_scale=0.25, v_scale=4.0)
    assert_near(out, batch_attention(q, [1] * 3, requests)[0])


@hopper
@pytest.mark.parametrize("page_size", [4, 16])
def test_every_number_of_splits(page_size):
    """Every number of splits of one and of several requests agrees with the result without splits."""
    for num_requests, kv_heads in ((1, 1), (3, 2)):
        lens = [random.randint(4000, 5000) for _ in range(num_requests)]
        paged = Paged(lens, page_size, kv_heads, 128, BF16, "cuda")
        q = drawn((num_requests, 4 * kv_heads, 128), BF16, "cuda")
        want, want_lse = wanted(q, paged)
        counts = set()
        for pages in (2000, *range(1500, 100, -200), *range(100, 15, -4)):
            wrapper = planned(paged, TYPES[0], (4 * kv_heads, kv_heads), fixed_split_size=pages * 4 // page_size)
            counts.add(num_partial_states(wrapper))
            for _ in range(2):
                out, lse = wrapper.run(q, paged.cache, return_lse=True)
                assert_near(out, want, lse, want_lse)
            assert not tickets_of(wrapper).any()
        assert len(counts) > 20 and min(counts) == 0


@hopper
def test_windows_of_split_keys_that_start_anywhere():
    """Splits start at the first key inside the window."""
    for window in (999, random.randint(500, 3000), random.randint(500, 3000)):
        paged = Paged([random.randint(3000, 4000), 5, 1000], 16, 1, 128, BF16, "cuda")
        wrapper = planned(paged, TYPES[0], (4, 1), window_left=window)
        assert num_partial_states(wrapper) > 1, "nothing was split"
        check(wrapper, paged, drawn((3, 4, 128), BF16, "cuda"), window_left=window)


@hopper
def test_a_graph_follows_plans():
    """One captured run serves plans with other lengths, with and without merges, and with empty requests."""
    most, heads = 4096, (8, 2)
    buffers = [int32([0] * size, "cuda") for size in (5, 4 * most // 16 + 8, 4)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace("cuda"), "NHD", True, False, *buffers, backend="fa3"
    )
    q, out = drawn((4, 8, 128), BF16, "cuda"), torch.empty(4, 8, 128, dtype=BF16, device="cuda")
    cache = torch.empty(4 * most // 16 + 2, 2, 16, 2, 128, dtype=BF16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for number, lens in enumerate(([most] * 4, [17, 0, 1, 4000], [5] * 4, [0] * 4, [3000, 0, 0, 0], [64, 65, 66, 67])):
        paged = Paged(lens, 16, 2, 128, BF16, "cuda")
        cache.fill_(math.nan)[: len(paged.cache)] = paged.cache
        wrapper.plan(*paged.tables_on("cpu"), *heads, 128, 16, q_data_type=BF16)
        if number == 0:
            wrapper.run(q, cache, out=out)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                wrapper.run(q, cache, out=out)
                wrapper.run(q, cache, out=out)
        out.fill_(math.nan)
        bits = []
        for _ in range(3):
            graph.replay()
            bits.append(out.clone())
        assert_near(out, wanted(q, paged)[0])
        assert torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2])
        assert not tickets_of(wrapper).any()


@hopper
def test_the_portable_kernels_agree():
    paged = Paged([1200, 40, 0, 3000], 16, 2, 128, BF16, "cuda")
    q = drawn((4, 8, 128), BF16, "cuda")
    portable = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"))
    portable.plan(*paged.tables_on("cpu"), 8, 2, 128, 16, q_data_type=BF16)
    torch.testing.assert_close(
        planned(paged, TYPES[0], (8, 2)).run(q, paged.cache), portable.run(q, paged.cache), rtol=2e-2, atol=2e-3
    )


@hopper
def test_strides_of_one_element_and_caches_of_nothing():
    paged = Paged([300, 5], 16, 1, 128, BF16, "cuda")
    q = drawn((2, 4, 128), BF16, "cuda")
    strange = tuple(x.as_strided(x.shape, (*x.stride()[:2], 3, 1)) for x in (paged.cache[:, 0], paged.cache[:, 1]))
    out = planned(paged, TYPES[0], (4, 1)).run(q, strange)
    assert_near(out, wanted(q, paged)[0])
    nothing = Paged([0, 0], 16, 1, 128, BF16, "cuda")
    wrapper = planned(nothing, TYPES[0], (4, 1))
    out, lse = wrapper.run(q, torch.empty(0, 2, 16, 1, 128, dtype=BF16, device="cuda"), return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@hopper
def test_other_modes_are_refused_on_a_gpu():
    paged = Paged([7], 16, 2, 128, BF16, "cuda")
    with pytest.raises(ValueError, match="backend: got 'fa3', .*: got pos_encoding_mode 'ROPE_LLAMA'"):
        planned(paged, TYPES[0], (4, 2), pos_encoding_mode="ROPE_LLAMA")


# Tests without a GPU


SERVED = CallProperties("decode", torch.device("cuda:0"), (BF16, BF16, BF16), (128, 128), 0, False, 0, 4)


@pytest.fixture
def as_sm90(monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "can_be_loaded", lambda wanted: True)


@pytest.mark.parametrize("change", [{}, dict(dtypes=(BF16, E4M3, BF16)), dict(group=100), dict(pos_encoding_mode=2)])
def test_only_fa3_selects_it(as_sm90, change):
    wanted = replace(SERVED, **change)
    assert choose("fa3", wanted, 1) == "sm90a"
    assert choose("auto", wanted, 10**6) == choose("fa2", wanted, 1) == "cuda"


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(pos_encoding_mode=1), "got pos_encoding_mode 'ROPE_LLAMA'"),
        (dict(dtypes=(E4M3, E4M3, BF16)), "got torch.float8_e4m3fn queries, wanted 16 bits"),
        (dict(mask_mode=2), "got a custom mask"),
        (dict(device=torch.device("cpu")), "got tensors on cpu"),
    ],
)
def test_unserved_calls_fail_with_the_reason(as_sm90, change, reason):
    with pytest.raises(ValueError, match="backend: got 'fa3', whose kernels do not support this call: ") as error:
        choose("fa3", replace(SERVED, **change), 1)
    assert reason in str(error.value)


def test_wrappers_refuse_it_on_a_cpu_and_with_custom_variants():
    paged = Paged([4], 16, 2, 64, F16, "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), backend="fa3")
    with pytest.raises(ValueError, match="backend: got 'fa3', .*: got tensors on cpu"):
        wrapper.plan(*paged.tables_on("cpu"), 4, 2, 64, 16)
    with pytest.raises(ValueError, match="backend: got 'fa3', wanted 'auto' or 'fa2' with jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), jit_args=("x",), backend="fa3")


def test_its_modules():
    spec = attention_spec("decode", KERNELS["fa3"], "bfloat16:float8_e4m3fn:bfloat16", "128", "alibi")
    assert (spec.name, spec.archs) == ("decode_bf16_kv_e4m3_d128_alibi_sm90a", ("9.0a",))
    names = {spec.name for spec in family("decode").aot_specs(Matrix(backends=("cuda",)))}
    assert names and not any("sm90a" in name for name in names), "nothing takes them by itself yet"


def test_plans_set_tickets_to_zero(device):
    """One ticket per merge and key head follows the lists. It is 0 for any content of the workspace."""
    dtype = F16
    paged = Paged([4000, 0, 900], 16, 2, 64, dtype, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    scheduler_of(wrapper).int_workspace.fill_(-1)
    wrapper.plan(*paged.tables_on("cpu"), 4, 2, 64, 16, q_data_type=dtype)
    lists = plan_of(wrapper).lists
    assert lists.max_merges > 0 and not tickets_of(wrapper).any()
    q = drawn((3, 4, 64), dtype, device)
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged)[0])
    assert not tickets_of(wrapper).any()
    short = lists._replace(plan=lists.plan[:-1])
    arguments = plan_of(wrapper).arguments._replace(plan=short.plan)
    k, v = paged.cache[:, 0], paged.cache[:, 1]
    out = torch.empty_like(q)
    with pytest.raises(RuntimeError, match="plan: .*got room for .* tickets, wanted "):
        plan_of(wrapper).operators.run(q, k, v, out, None, *arguments, *plan_of(wrapper).parameters)
