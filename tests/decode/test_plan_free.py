"""Decode without a plan: values against float64, lengths that change under one CUDA graph, and errors per argument."""

from __future__ import annotations

import gc
import math
import random
import weakref
from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.xqa import trtllm_batch_decode_with_kv_cache, xqa, xqa_batch_decode_with_kv_cache

from ..conftest import no_synchronisation
from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, int32, variant_dtype

HEADS, KV_HEADS, DIM = 6, 2, 64
E4M3 = torch.float8_e4m3fn
# Dtype of queries over caches of 8 bits: a CPU shares modules with other tests, a GPU has the one of engines.
DTYPE_OF_8_BITS = {"cpu": torch.float16, "cuda": torch.bfloat16}


def poisoned(device: str, size: int = 32 << 20) -> torch.Tensor:
    """Return a workspace whose bytes are no valid schedule. It begins at no multiple of 32."""
    return torch.full((size + 8,), 255, dtype=torch.uint8, device=device)[8:]


class Drawn:
    """Requests with a padded page table, and the queries of each."""

    def __init__(self, device: str, lens: list[int], page_size: int = 16, counts: list[int] | None = None,
                 kv_dtype: torch.dtype | None = None, layout: str = "NHD", form: str = "pair", strided: bool = False,
                 dtype: torch.dtype | None = None, heads: tuple[int, int] = (HEADS, KV_HEADS)) -> None:  # fmt: skip
        dtype = dtype or variant_dtype(device)
        self.lens, self.counts = lens, counts or [1] * len(lens)
        self.paged = Paged(lens, page_size, heads[1], DIM, kv_dtype or dtype, device, layout, form)
        self.q = drawn((sum(self.counts), heads[0], DIM), dtype, device)
        columns = max(map(len, self.paged.tables)) + 2
        table = torch.full((len(lens), columns + (3 if strided else 0)), 2**30, dtype=torch.int32)
        for row, pages in zip(table, self.paged.tables, strict=True):
            row[: len(pages)] = int32(pages)
        self.layout = layout
        self.arguments = dict(
            query=self.q, kv_cache=self.paged.cache, workspace_buffer=poisoned(device),
            block_tables=table.to(device)[:, :columns], seq_lens=int32(lens, device),
            max_seq_len=max(1, *lens), bmm1_scale=DIM**-0.5, kv_layout=layout,
        )  # fmt: skip

    def wanted(self, q: torch.Tensor | None = None, masks: Any = None, **options: Any) -> torch.Tensor:
        requests = [self.paged.request(b) for b in range(len(self.lens))]
        q = self.q if q is None else q
        return batch_attention(q, self.counts, requests, masks, **({"causal": True, "sm_scale": DIM**-0.5} | options))[
            0
        ]


def drawn_lens(least: int = 1) -> list[int]:
    """Return lengths, some of them split and some of one key."""
    return [least, 0 if least == 1 else least, 900, *(random.randint(least, 150) for _ in range(4)), 3000]


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("options", [{}, dict(window_left=70), dict(window_left=0), dict(sinks=True)], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_values(q_len, options, layout, device):
    for form, page_size in (("one", 16), ("torn", 5)):
        lens = drawn_lens(q_len)
        batch = Drawn(device, lens, page_size, [q_len] * len(lens), layout=layout, form=form, strided=form == "torn")
        more = options | (dict(sinks=torch.randn(HEADS, device=device)) if "sinks" in options else {})
        out = torch.full_like(batch.q, math.nan)
        with no_synchronisation(device):
            got = xqa_batch_decode_with_kv_cache(**batch.arguments, **more, q_len_per_req=q_len, out=out)
        assert got is out
        assert_near(out, batch.wanted(**more))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits(dtype, device):
    batch = Drawn(device, drawn_lens(), dtype=dtype)
    assert_near(xqa_batch_decode_with_kv_cache(**batch.arguments), batch.wanted())


@pytest.mark.parametrize("heads", [(8, 1), (4, 4), (40, 2)])
def test_groups_of_heads(heads, device):
    for q_len in (1, 3):
        lens = drawn_lens(q_len)
        batch = Drawn(device, lens, counts=[q_len] * len(lens), heads=heads)
        assert_near(xqa_batch_decode_with_kv_cache(**batch.arguments, q_len_per_req=q_len), batch.wanted())


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_caches_of_8_bits(q_len, kind, device):
    lens = drawn_lens(q_len)
    batch = Drawn(device, lens, counts=[q_len] * len(lens), kv_dtype=E4M3, dtype=DTYPE_OF_8_BITS[device])
    scales = dict(bmm1_scale=0.7 * DIM**-0.5, bmm2_scale=1.7)
    if kind == "tensors":
        scales = {name: torch.tensor(number, device=device) for name, number in scales.items()}
    want = batch.wanted(sm_scale=0.7 * DIM**-0.5) * 1.7
    arguments = batch.arguments | scales | dict(q_len_per_req=q_len)
    with no_synchronisation(device):
        got = xqa_batch_decode_with_kv_cache(**arguments)
    assert_near(got, want)
    eight = torch.full_like(batch.q, math.nan).to(E4M3)
    arguments["bmm2_scale"] = arguments["bmm2_scale"] / 0.01
    xqa_batch_decode_with_kv_cache(**arguments, out=eight, o_scale=0.01)  # the scale is a part of bmm2_scale
    assert_near(eight.float() * 0.01, want.clamp(-4.48, 4.48), tolerance=0.07)


def test_keys_that_are_also_the_values(device):
    batch = Drawn(device, [40, 700])
    batch.paged.v = batch.paged.k
    batch.arguments["kv_cache"] = batch.paged.cache[0].unsqueeze(1)
    assert_near(xqa_batch_decode_with_kv_cache(**batch.arguments), batch.wanted())


def test_lengths_of_uint32_and_beyond_the_bounds(device):
    """Lengths beyond max_seq_len, and beyond the pages of the table, count as the bound."""
    batch = Drawn(device, [64, 64, 32], 16)
    table = batch.arguments["block_tables"][:, :4].contiguous()
    arguments = batch.arguments | dict(block_tables=table, max_seq_len=10_000)
    want = batch.wanted()
    lens = torch.tensor([64, 2**31 - 1, 32], device=device).to(torch.uint32)
    assert_near(xqa_batch_decode_with_kv_cache(**arguments | dict(seq_lens=lens)), want)
    bounded = arguments | dict(max_seq_len=64, block_tables=batch.arguments["block_tables"])
    assert_near(xqa_batch_decode_with_kv_cache(**bounded | dict(seq_lens=lens)), want)


def test_batches_of_nothing(device):
    batch = Drawn(device, [0, 0], form="pair")
    assert not xqa_batch_decode_with_kv_cache(**batch.arguments).any()
    empty = batch.arguments | dict(block_tables=batch.arguments["block_tables"][:, :0], seq_lens=int32([5, 0], device))
    assert not xqa_batch_decode_with_kv_cache(**empty).any()
    none = dict(query=batch.q[:0], block_tables=batch.arguments["block_tables"][:0], seq_lens=int32([], device))
    assert xqa_batch_decode_with_kv_cache(**batch.arguments | none).shape == (0, HEADS, DIM)


def test_a_length_below_the_queries(device):
    """The first queries of a request with fewer keys than queries see none, as padding rows do."""
    batch = Drawn(device, [2, 0, 7], counts=[4] * 3)
    assert_near(xqa_batch_decode_with_kv_cache(**batch.arguments, q_len_per_req=4), batch.wanted())


# Masks of draft tokens


def packed(masks: list[torch.Tensor], words: int) -> torch.Tensor:
    """Return the bits of masks ``[queries, queries]``, ``[all queries, words]`` of 16 bits."""
    rows = []
    for mask in masks:
        bits = torch.zeros(len(mask), 16 * words, dtype=torch.int64)
        bits[:, : len(mask)] = mask.long()
        rows.append((bits.view(len(mask), words, 16) << torch.arange(16)).sum(-1))
    return torch.cat(rows).to(torch.int32).to(torch.uint16)


def seen(mask: torch.Tensor, kv_len: int, window_left: int = -1) -> torch.Tensor:
    """Return the keys that queries see, ``[queries, kv_len]``."""
    count = len(mask)
    all_keys = torch.ones(count, kv_len, dtype=torch.bool)
    all_keys[:, kv_len - count :] = mask
    return all_keys


@pytest.mark.parametrize("q_len", [1, 5, 17, 40])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_masks_of_drafts(q_len, sinks, device):
    lens = [q_len, q_len + 3, 700, 2500]
    batch = Drawn(device, lens, counts=[q_len] * len(lens))
    words = 2 * -(-q_len // 32)
    masks = [torch.rand(q_len, q_len) < 0.5 for _ in lens]
    more = dict(sinks=torch.randn(HEADS, device=device)) if sinks else {}
    bits = packed(masks, words).view(len(lens), q_len, words).to(device)
    got = xqa_batch_decode_with_kv_cache(**batch.arguments, **more, q_len_per_req=q_len, mask=bits)
    assert_near(got, batch.wanted(masks=[seen(mask, n) for mask, n in zip(masks, lens, strict=True)], **more))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_requests_of_different_queries(masked, device):
    lens, counts = [30, 9, 1000, 2000, 5], [3, 0, 9, 1, 5]
    batch = Drawn(device, lens, counts=counts)
    masks = [torch.rand(count, count) < 0.5 for count in counts]
    starts = int32([sum(counts[:b]) for b in range(len(counts) + 1)], device)
    mask = packed(masks, 2).to(device) if masked else None
    want = batch.wanted(masks=[seen(m, n) for m, n in zip(masks, lens, strict=True)] if masked else None)
    arguments = batch.arguments | dict(mask=mask)
    assert_near(xqa_batch_decode_with_kv_cache(**arguments, q_len_per_req=9, q_cu_seq_lens=starts), want)
    got = trtllm_batch_decode_with_kv_cache(**arguments, q_len_per_req=None, max_q_len=9, cum_seq_lens_q=starts)
    assert_near(got, want)


def test_masks_in_a_window(device):
    """With a window, a mask that is causal gives the result without one."""
    batch = Drawn(device, [6, 300], counts=[6, 6])
    bits = packed([torch.ones(6, 6).tril().bool()] * 2, 2).view(2, 6, 2).to(device)
    options = dict(q_len_per_req=6, window_left=3)
    got = xqa_batch_decode_with_kv_cache(**batch.arguments, **options, mask=bits)
    assert_near(got, batch.wanted(window_left=3))


@pytest.mark.slow
def test_masks_with_caches_of_8_bits(device):
    batch = Drawn(device, [20, 900], counts=[5, 5], kv_dtype=E4M3, dtype=DTYPE_OF_8_BITS[device])
    masks = [torch.rand(5, 5) < 0.5 for _ in "12"]
    bits = packed(masks, 2).view(2, 5, 2).to(device)
    scale = torch.tensor(0.2, device=device)
    got = xqa_batch_decode_with_kv_cache(**batch.arguments | dict(bmm1_scale=scale), q_len_per_req=5, mask=bits)
    want = batch.wanted(masks=[seen(m, n) for m, n in zip(masks, batch.lens, strict=True)], sm_scale=0.2)
    assert_near(got, want)


# Graphs. On a CPU, everything except the capture is tested.


@pytest.mark.parametrize("form", ["one query", "queries", "masked"])
def test_one_graph_serves_any_lengths(form, device):
    q_len, most, page_size, count = 1 if form == "one query" else 4, 3000, 16, 9
    pages = count * -(-most // page_size) + 2
    dtype = variant_dtype(device)
    q = torch.zeros(count * q_len, HEADS, DIM, dtype=dtype, device=device)
    cache = torch.zeros(pages, 2, page_size, KV_HEADS, DIM, dtype=dtype, device=device)
    table = torch.zeros(count, -(-most // page_size), dtype=torch.int32, device=device)
    lens, out, scale = int32([0] * count, device), torch.zeros_like(q), torch.zeros(1, device=device)
    mask = torch.zeros(count, q_len, 2, dtype=torch.int32, device=device).to(torch.uint16)
    arguments = dict(
        query=q, kv_cache=cache, workspace_buffer=poisoned(device), block_tables=table, seq_lens=lens,
        max_seq_len=most, bmm1_scale=scale, out=out, q_len_per_req=q_len, mask=mask if form == "masked" else None,
    )  # fmt: skip
    graph = None
    for bound in (50, most, 600, q_len):
        new = [random.randint(q_len, bound) for _ in range(count)]
        batch = Drawn(device, new, page_size, [q_len] * count, form="one")
        masks = [torch.rand(q_len, q_len) < 0.6 for _ in new]
        table.fill_(2**30)
        columns = batch.arguments["block_tables"].shape[1]
        table[:, : min(columns, table.shape[1])] = batch.arguments["block_tables"][:, : table.shape[1]]
        cache[: len(batch.paged.cache)] = batch.paged.cache
        q.copy_(batch.q), lens.copy_(int32(new)), out.fill_(math.nan)
        scale.fill_((0.4 + 0.6 * bound / most) * DIM**-0.5)  # larger ones spread the logits, and so their errors
        mask.copy_(packed(masks, 2).view(count, q_len, 2))
        if device == "cpu" or graph is None:
            xqa_batch_decode_with_kv_cache(**arguments)
        if device == "cuda" and graph is None:
            out.fill_(math.nan)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                xqa_batch_decode_with_kv_cache(**arguments)
        if graph is not None:
            graph.replay()
        visible = [seen(m, n) for m, n in zip(masks, new, strict=True)] if form == "masked" else None
        assert_near(out, batch.wanted(masks=visible, sm_scale=float(scale)))


def test_equal_inputs_give_equal_bits(device):
    batch = Drawn(device, [*drawn_lens(), 5000, 4000])
    first = xqa_batch_decode_with_kv_cache(**batch.arguments)
    for _ in range(3):
        assert xqa_batch_decode_with_kv_cache(**batch.arguments).equal(first)


# Other forms


def test_the_form_of_xqa(device):
    lens, scale = [1, 77, 2000], 0.9
    for q_len, window in ((1, 0), (1, 50), (4, 50)):
        counts = [q_len] * len(lens)
        batch = Drawn(
            device, [max(n, q_len) for n in lens], counts=counts, kv_dtype=E4M3, dtype=DTYPE_OF_8_BITS[device]
        )
        given, sinks = batch.arguments, torch.randn(KV_HEADS, HEADS // KV_HEADS, device=device)
        shape = (len(lens), 1, HEADS, DIM) if q_len == 1 else (len(lens), 1, q_len, HEADS, DIM)
        output = torch.full_like(batch.q, math.nan).view(shape)
        xqa(
            batch.q.view(shape), *given["kv_cache"], given["block_tables"], given["seq_lens"].view(-1, 1), output,
            given["workspace_buffer"], None, KV_HEADS, 16, sinks, 1.5, scale, window, q_seq_len=q_len,
        )  # fmt: skip
        options = dict(sinks=sinks.view(-1), window_left=window - 1, sm_scale=1.5 * scale * DIM**-0.5)
        assert_near(output.view_as(batch.q), batch.wanted(**options) * scale)
        eight = torch.full_like(output, math.nan).to(E4M3)
        xqa(
            batch.q.view(shape), *given["kv_cache"], given["block_tables"], given["seq_lens"].view(-1, 1), eight,
            given["workspace_buffer"], None, KV_HEADS, 16, sinks, 1.5, scale, window, rcp_out_scale=50.0, q_seq_len=q_len,
        )  # fmt: skip
        assert_near(eight.float().view_as(batch.q) / 50, batch.wanted(**options) * scale, tolerance=0.07)


def test_the_form_of_trtllm(device):
    batch = Drawn(device, drawn_lens(), layout="HND", form="one", kv_dtype=E4M3, dtype=DTYPE_OF_8_BITS[device])
    given = [batch.arguments[n] for n in ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens")]
    want = batch.wanted(sm_scale=0.2, window_left=600) * 1.1
    got = trtllm_batch_decode_with_kv_cache(
        *given, 3000, 0.2, 1.1, 600, None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
        multi_ctas_kv_counter_buffer=torch.empty(1, device=device), backend="xqa", uses_shared_paged_kv_idx=True,
        bmm1_scale_log2=None,
    )  # fmt: skip
    assert_near(got, want)
    eight = trtllm_batch_decode_with_kv_cache(*given, 3000, 0.2, 1.1 / 0.02, 600, out_dtype=E4M3, o_scale=0.02)
    assert eight.dtype == E4M3
    assert_near(eight.float() * 0.02, want, tolerance=0.07)


# Errors


def change(name: str, value: Any) -> Any:
    return lambda given: given | {name: value(given[name]) if callable(value) else value}


BAD = {
    "query: got 2 dimensions, wanted 3": change("query", lambda q: q[0]),
    "k_cache: got shape": change("query", lambda q: q[..., :32]),
    "query: got 5 heads, wanted a multiple of the cache's 2": change("query", lambda q: q[:, :5]),
    "query: got 2 queries, wanted 3": change("query", lambda q: q[:2]),
    "query: got torch.float64": change("query", lambda q: q.double()),
    "kv_cache: got int, wanted a tensor of 5 dimensions": change("kv_cache", 3),
    "kv_cache: got shape .*, wanted .*1 or 2": change("kv_cache", lambda kv: torch.stack([kv[0]] * 3, 1)),
    "v_cache: got shape": change("kv_cache", lambda kv: (kv[0], kv[1][1:])),
    "v_cache: got torch.float64": change("kv_cache", lambda kv: (kv[0], kv[1].double())),
    "k_cache: got torch.float64": change("kv_cache", lambda kv: (kv[0].double(), kv[1].double())),
    "workspace_buffer: got 920 bytes": change("workspace_buffer", lambda w: w[24 : 24 + 920]),
    "workspace_buffer: got NoneType": change("workspace_buffer", None),
    "workspace_buffer: got a tensor on": change("workspace_buffer", lambda w: w[::2]),
    "block_tables: got torch.int64": change("block_tables", lambda t: t.long()),
    "block_tables: got 1 dimensions": change("block_tables", lambda t: t[0]),
    "block_tables: got stride": change("block_tables", lambda t: t.repeat_interleave(2, 1)[:, ::2]),
    "seq_lens: got torch.int64": change("seq_lens", lambda n: n.long()),
    "seq_lens: got shape .2., wanted .3.": change("seq_lens", lambda n: n[:2]),
    "max_seq_len: got 0, wanted a positive": change("max_seq_len", 0),
    "max_seq_len: got str, wanted an integer": change("max_seq_len", "9"),
    "bmm1_scale: got .*float64": change("bmm1_scale", torch.ones(1, dtype=torch.float64)),
    "bmm1_scale: got nan": change("bmm1_scale", math.nan),
    "bmm2_scale: got inf": change("bmm2_scale", math.inf),
    "window_left: got float|window_left: got 1.5": change("window_left", 1.5),
    "out: got shape": change("out", lambda _: torch.empty(3, HEADS, DIM + 8)),
    "out: got torch.float64": change("out", lambda _: torch.empty(3, HEADS, DIM, dtype=torch.float64)),
    "sinks: got torch.float64": change("sinks", torch.ones(HEADS, dtype=torch.float64)),
    "sinks: got shape": change("sinks", torch.ones(HEADS - 1)),
    "kv_layout: got 'NDH'": change("kv_layout", "NDH"),
    "q_len_per_req: got 0": change("q_len_per_req", 0),
    "q_len_per_req: got None": change("q_len_per_req", None),
    "mask: got torch.int32, wanted torch.uint16": change("mask", torch.zeros(3, 1, 2, dtype=torch.int32)),
    "mask: got shape .*, wanted 2 words for each of 3": change("mask", torch.zeros(3, 1, 1, dtype=torch.uint16)),
    "q_cu_seq_lens: got shape": change("q_cu_seq_lens", torch.zeros(3, dtype=torch.int32)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    batch = Drawn("cpu", [9, 20, 3])
    out = torch.full_like(batch.q, 77.0)
    given = batch.arguments | dict(
        bmm2_scale=1.0, window_left=-1, out=out, sinks=None, q_len_per_req=1, o_scale=1.0, mask=None, q_cu_seq_lens=None
    )
    with pytest.raises((ValueError, TypeError), match=f"^xqa_batch_decode_with_kv_cache: ({message})"):
        xqa_batch_decode_with_kv_cache(**BAD[message](given))
    assert (out == 77).all()


@pytest.mark.parametrize("name", ["query", "kv_cache", "block_tables", "seq_lens", "workspace_buffer"])
def test_another_device_after_a_call_of_the_same_shapes(name, device):
    """Shapes are checked once. The device of each tensor is checked in every call."""
    batch = Drawn(device, [9, 20, 3])
    xqa_batch_decode_with_kv_cache(**batch.arguments)
    out, given = torch.full_like(batch.q, 77.0), batch.arguments[name]
    other = (given[0], given[1].to("meta")) if name == "kv_cache" else given.to("meta")
    with pytest.raises(ValueError, match="meta"):
        xqa_batch_decode_with_kv_cache(**batch.arguments | {name: other}, out=out)
    assert (out == 77).all()


def test_a_workspace_is_freed(device):
    """Views of workspaces are kept, but they keep no workspace alive."""
    batch = Drawn(device, [9, 20, 3])
    memory = batch.arguments["workspace_buffer"].clone()
    freed = weakref.ref(memory)
    for _ in range(2):
        xqa_batch_decode_with_kv_cache(**batch.arguments | dict(workspace_buffer=memory))
    del memory
    gc.collect()
    assert freed() is None


def test_unsupported_arguments():
    batch = Drawn("cpu", [9, 20, 3])
    given, sf = batch.arguments, torch.zeros(1)
    with pytest.raises(UnsupportedError, match="kv_cache_sf: got scales, wanted None"):
        xqa_batch_decode_with_kv_cache(**given, kv_cache_sf=sf)
    for name, value in (
        ("return_lse", True), ("kv_cache_sf", sf), ("uses_shared_paged_kv_idx", False), ("bmm1_scale_log2", sf),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"trtllm_batch_decode_with_kv_cache: {name}: got"):
            trtllm_batch_decode_with_kv_cache(**given, **{name: value})
    with pytest.raises(UnsupportedError, match="trtllm_batch_decode_with_kv_cache: return_lse: got"):
        trtllm_batch_decode_with_kv_cache(**given, lse=sf)
    for name, value in (("o_sf_scale", 1.0), ("o_sf_vec_size", 16), ("backend", "trtllm-gen"), ("out_dtype", "uint8")):
        with pytest.raises((ValueError, TypeError), match=f"trtllm_batch_decode_with_kv_cache: (out|{name}): got"):
            trtllm_batch_decode_with_kv_cache(**given, **{name: value})
    with pytest.raises(GradientError, match="xqa_batch_decode_with_kv_cache: has no gradient"):
        xqa_batch_decode_with_kv_cache(**given | dict(query=batch.q.requires_grad_()))


@pytest.mark.parametrize("name, value", [("num_kv_heads", 3), ("page_size", 8), ("sliding_win_size", -1)])
def test_bad_arguments_of_xqa(name, value):
    batch = Drawn("cpu", [9, 20, 3])
    q = batch.q.unsqueeze(1)
    given = dict(
        q=q, k_cache=batch.paged.cache[0], v_cache=batch.paged.cache[1], page_table=batch.arguments["block_tables"],
        seq_lens=batch.arguments["seq_lens"], output=torch.full_like(q, 77.0),
        workspace_buffer=batch.arguments["workspace_buffer"], semaphores=None, num_kv_heads=KV_HEADS, page_size=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^xqa: {name}: got {value}, wanted"):
        xqa(**given | {name: value})
    with pytest.raises(ValueError, match="^xqa: output: got shape"):
        xqa(**given | dict(output=batch.q))
    assert (given["output"] == 77).all()
