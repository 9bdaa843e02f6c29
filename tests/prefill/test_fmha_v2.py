"""Prefill from tables on the device against float64: layouts, masks, dtypes, and errors per argument."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.prefill import trtllm_fmha_v2_prefill

from ..conftest import no_synchronisation
from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]
DIM = 64


def work_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else F16


class Drawn:
    """A batch in one layout, as arguments of the function, and its requests for the oracle."""

    def __init__(self, device: str, layout: str, dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None,
                 form: str = "one", heads: tuple[int, int] = (4, 2), dim: int = DIM, qo_lens: list[int] | None = None,
                 kv_lens: list[int] | None = None, page_size: int = 16, **changes) -> None:  # fmt: skip
        dtype = dtype or work_dtype(device)
        kv_dtype, heads = kv_dtype or dtype, (heads[0], heads[0]) if layout == "PACKED_QKV" else heads
        kv_lens = kv_lens or [0, 1, random.randint(2, 60), random.randint(61, 300)]
        qo_lens = qo_lens or [min(n, most) for n, most in zip(kv_lens, (3, 1, 50, random.randint(1, 300)), strict=True)]
        if layout == "PACKED_QKV":
            qo_lens = kv_lens
        self.qo_lens, self.q = qo_lens, drawn((sum(qo_lens), heads[0], dim), dtype, device)
        tables, device_lens = None, int32(kv_lens, device)
        if layout.startswith("Q_PAGED"):
            paged = Paged(kv_lens, page_size, heads[1], dim, kv_dtype, device, layout[-3:], form)
            self.requests, cache = [paged.request(b) for b in range(len(kv_lens))], paged.cache
            tables = torch.full((len(kv_lens), max(map(len, paged.tables)) + 2), 2**30, dtype=torch.int32)
            for row, pages in zip(tables, paged.tables, strict=True):
                row[: len(pages)] = int32(pages)
            qkv, tables = (self.q, cache), tables.to(device)
        else:
            kv = torch.randn(sum(kv_lens), 2, heads[1], dim).to(kv_dtype).to(device)
            self.requests = [tuple(part.float().unbind(1)) for part in kv.cpu().split(kv_lens)]
            qkv = (self.q, kv) if layout == "CONTIGUOUS_Q_KV" else (self.q, *kv.unbind(1))
            if layout == "PACKED_QKV":
                qkv = torch.cat([self.q[:, None], kv], 1)
        size = (64 if device == "cpu" else 128) << 20
        self.arguments = dict(
            qkv=qkv, input_layout=layout, workspace_buffer=torch.full((size + 8,), 255, dtype=torch.uint8, device=device)[8:],
            seq_lens=device_lens, max_q_len=max(1, *qo_lens), max_kv_len=max(1, *kv_lens), bmm1_scale=dim**-0.5,
            bmm2_scale=1.0, batch_size=len(kv_lens), cum_seq_lens_q=indptr_of(qo_lens).to(device),
            cum_seq_lens_kv=indptr_of(kv_lens).to(device), block_tables=tables,
        ) | changes  # fmt: skip
        self.scale = dim**-0.5

    def wanted(self, masks=None, **options):
        q = self.q.float() if self.q.dtype == E4M3 else self.q
        return batch_attention(q, self.qo_lens, self.requests, masks, **({"sm_scale": self.scale} | options))


def chunk_masks(batch: Drawn, size: int, window: int = -1) -> list[torch.Tensor]:
    masks = []
    for qo_len, (k, _) in zip(batch.qo_lens, batch.requests, strict=True):
        position, key = torch.arange(qo_len)[:, None] + len(k) - qo_len, torch.arange(len(k))[None, :]
        seen = (key <= position) & (key >= position // size * size)
        masks.append(seen & (key >= position - window) if window >= 0 else seen)
    return masks


def checked(batch: Drawn, want, **options) -> None:
    out = torch.full_like(batch.q, torch.nan)
    got, lse = trtllm_fmha_v2_prefill(**batch.arguments, out=out, save_softmax_stats=True, **options)
    assert got is out
    assert_near(out, want[0], lse / math.log(2), want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_masks(layout, device):
    for form in ("one", "pair", "torn") if layout.startswith("Q_PAGED") else ("",):
        batch = Drawn(device, layout, form=form, page_size=random.choice([1, 5, 16]))
        window = random.choice([0, 3, 50])
        checked(batch, batch.wanted(causal=True))
        checked(batch, batch.wanted(causal=True, window_left=window), window_left=window, mask_mode="causal")
        checked(batch, batch.wanted(causal=True, window_left=window), window_left=window, mask_mode="SLIDING_WINDOW")
        checked(batch, batch.wanted(), mask_mode="padding")


@pytest.mark.parametrize("layout", ["SEPARATE_Q_K_V", "Q_PAGED_KV_NHD"])
@pytest.mark.parametrize("size", [1, 16, 64, 1 << 30])
def test_chunks(layout, size, device):
    batch, window = Drawn(device, layout), random.choice([-1, 5, 100])
    want = batch.wanted(chunk_masks(batch, size, window))
    checked(batch, want, mask_mode="chunked", chunked_attention_size=size, window_left=window)


def test_soft_cap_and_sinks(device):
    batch, sinks = Drawn(device, "CONTIGUOUS_Q_KV"), torch.randn(4)
    given = sinks.to(device)
    checked(batch, batch.wanted(causal=True, sinks=sinks), sinks=given)
    checked(batch, batch.wanted(causal=True, logits_soft_cap=3.0), logits_soft_cap_scale=3.0)
    want = batch.wanted(chunk_masks(batch, 32), logits_soft_cap=3.0, sinks=sinks)
    chunks = dict(mask_mode="chunked", chunked_attention_size=32)
    checked(batch, want, logits_soft_cap_scale=3.0, sinks=given, **chunks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", [BF16, F16, E4M3])
def test_eight_bits(layout, out_dtype, device):
    batch = Drawn(device, layout, E4M3)
    out = trtllm_fmha_v2_prefill(**batch.arguments | dict(bmm2_scale=0.5), out_dtype=out_dtype)
    want = batch.wanted(causal=True)[0] * 0.5
    assert out.dtype == out_dtype
    tolerance = {BF16: 1.6e-2, F16: 2e-3, E4M3: 0.08}[out_dtype]
    assert_near(out.float(), want, tolerance=tolerance)


def test_an_8_bit_cache_of_16_bit_queries(device):
    batch = Drawn(device, "Q_PAGED_KV_HND", F16, E4M3)
    checked(batch, batch.wanted(causal=True))


def test_saturates(device):
    batch = Drawn(device, "SEPARATE_Q_K_V", E4M3)
    out = trtllm_fmha_v2_prefill(**batch.arguments | dict(bmm2_scale=1e6), out_dtype=E4M3).float()
    assert out.isfinite().all() and out.abs().max() == 448


def test_scales_on_the_device(device):
    batch = Drawn(device, "SEPARATE_Q_K_V")
    scales = dict(bmm1_scale=torch.tensor([DIM**-0.5], device=device), bmm2_scale=torch.tensor(2.0, device=device))
    out = trtllm_fmha_v2_prefill(**batch.arguments | scales)
    assert_near(out, batch.wanted(causal=True)[0] * 2)


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"])
def test_pages_of_two_views_counted_from_keys(layout, device):
    """SGLang passes two views of one buffer, and a table of both."""
    batch = Drawn(device, layout, form="pair")
    k, v = batch.arguments["qkv"][1]
    gap = random.choice([0, 3])
    room = torch.full((2 * len(k) + gap, *k.shape[1:]), math.nan, dtype=k.dtype, device=device)
    distance = len(k) + gap
    room[: len(k)], room[distance:] = k, v
    tables = batch.arguments["block_tables"]
    both = torch.stack([tables, tables + distance], 1)
    changes = dict(qkv=(batch.q, (room[: len(k)], room[distance:])), block_tables=both)
    out = trtllm_fmha_v2_prefill(**batch.arguments | changes)
    assert_near(out, batch.wanted(causal=True)[0])
    if device == "cpu":
        with pytest.raises(
            ValueError,
            match="block_tables: got other pages of values, wanted each page of values equal to its page of keys plus",
        ):
            trtllm_fmha_v2_prefill(**batch.arguments | changes | dict(block_tables=torch.stack([tables] * 2, 1)))
    apart = (k, v[:, :-1] if layout.endswith("NHD") else v[:, :, :-1])
    with pytest.raises(ValueError, match="v: got|block_tables: got"):
        trtllm_fmha_v2_prefill(**batch.arguments | changes | dict(qkv=(batch.q, apart)))


def test_many_tiles_and_splits(device):
    for heads, kv_lens in [((8, 1), [700, 40, 1]), ((4, 4), [3000]), ((6, 2), [5, 2000, 9, 300, 0, 80])]:
        qo_lens = [min(n, random.randint(1, 400)) for n in kv_lens]
        batch = Drawn(device, "Q_PAGED_KV_NHD", heads=heads, kv_lens=kv_lens, qo_lens=qo_lens)
        checked(batch, batch.wanted(causal=True))
        want = batch.wanted(chunk_masks(batch, 128))
        checked(batch, want, mask_mode="chunked", chunked_attention_size=128)


def test_queries_without_keys_and_empty_batches(device):
    batch = Drawn(device, "SEPARATE_Q_K_V", qo_lens=[5, 4], kv_lens=[0, 2])
    checked(batch, batch.wanted(causal=True))
    none = Drawn(device, "SEPARATE_Q_K_V", qo_lens=[0], kv_lens=[3])
    out, lse = trtllm_fmha_v2_prefill(**none.arguments, save_softmax_stats=True)
    assert out.shape == (0, 4, DIM) and lse.shape == (0, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_serves_other_lengths():
    batch = Drawn("cuda", "Q_PAGED_KV_NHD", qo_lens=[7, 30], kv_lens=[90, 200])
    with no_synchronisation("cuda"):
        out = trtllm_fmha_v2_prefill(**batch.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trtllm_fmha_v2_prefill(**batch.arguments)
    batch.arguments["seq_lens"].copy_(int32([40, 150]))
    batch.requests = [(k[:n], v[:n]) for (k, v), n in zip(batch.requests, (40, 150), strict=True)]
    graph.replay()
    assert_near(out, batch.wanted(causal=True)[0])


BAD = [
    (dict(input_layout="Q_KV"), ValueError, "input_layout: got 'Q_KV', wanted 'PACKED_QKV', "),
    (dict(qkv=torch.zeros(3)), TypeError, "qkv: got Tensor, wanted a list or tuple"),
    (dict(seq_lens=torch.zeros(2).int()), ValueError, "seq_lens: got"),
    (dict(seq_lens=torch.zeros(3)), TypeError, "seq_lens: got torch.float32, wanted"),
    (dict(batch_size=0), ValueError, "batch_size: got 0, wanted a positive number"),
    (dict(max_q_len=0), ValueError, "max_q_len: got 0, wanted a positive number"),
    (dict(max_kv_len=0), ValueError, "max_kv_len: got 0, wanted a positive number"),
    (dict(cum_seq_lens_q=torch.zeros(3).int()), ValueError, "cum_seq_lens_q: got"),
    (dict(cum_seq_lens_q=int32([0, 5, 3, 9])), ValueError, "cum_seq_lens_q: got offsets that decrease"),
    (dict(cum_seq_lens_q=int32([0, 5, 6, 99])), ValueError, "cum_seq_lens_q: got 99, wanted 0 to 9"),
    (dict(cum_seq_lens_kv=torch.zeros(2).int()), ValueError, "cum_seq_lens_kv: got"),
    (dict(cum_seq_lens_kv=int32([0, 5, 29, 40])), ValueError, "cum_seq_lens_kv: got 49, wanted 0 to 40"),
    (dict(cum_seq_lens_kv=int32([-1, 5, 9, 40])), ValueError, "cum_seq_lens_kv: got -1, wanted at least 0"),
    (dict(block_tables=torch.zeros(3, 4).int()), ValueError, "block_tables: got a tensor, wanted None"),
    (dict(bmm1_scale=math.nan), ValueError, "bmm1_scale: got nan"),
    (dict(bmm2_scale=torch.ones(2)), ValueError, "bmm2_scale: got torch.float32 of shape"),
    (dict(out=torch.zeros(9, 4, 32)), ValueError, "out: got"),
    (dict(out_dtype=torch.int8), TypeError, "out_dtype: got torch.int8"),
    (dict(out_dtype=E4M3), TypeError, "out_dtype: got torch.float8_e4m3fn"),
    (dict(sinks=torch.zeros(3)), ValueError, "sinks: got"),
    (dict(pos_encoding_mode="ALIBI"), UnsupportedError, "pos_encoding_mode: got 'ALIBI', wanted None"),
    (dict(logits_soft_cap_scale=-1.0), ValueError, "logits_soft_cap_scale: got -1.0, wanted 0 or more"),
    (dict(mask_mode="full"), ValueError, "mask_mode: got 'full', wanted 'causal', "),
    (dict(mask_mode=1), TypeError, "mask_mode: got int, wanted one of causal, "),
    (dict(mask_mode="sliding_window"), ValueError, "window_left: got -1, wanted 0 or more for sliding_window"),
    (dict(window_left=-2), ValueError, "window_left: got -2, wanted at least -1"),
    (
        dict(mask_mode="chunked", chunked_attention_size=24),
        ValueError,
        "chunked_attention_size: got 24, wanted a power",
    ),
    (dict(mask_mode="chunked"), ValueError, "chunked_attention_size: got 0, wanted a power of two"),
    (dict(chunked_attention_size=16), ValueError, "chunked_attention_size: got 16, wanted 0 for causal"),
    (dict(workspace_buffer=torch.zeros(64).byte()), ValueError, "workspace_buffer: got"),
    (dict(workspace_buffer=torch.zeros(64, 2).byte()[:, 0]), ValueError, "workspace_buffer: got"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=lambda x: x.split(":")[0] if isinstance(x, str) else "")
def test_errors(change, error, message):
    batch = Drawn("cpu", "SEPARATE_Q_K_V", qo_lens=[5, 1, 3], kv_lens=[5, 15, 20])
    out = torch.full((9, 4, DIM), 7.0)
    with pytest.raises(error, match="trtllm_fmha_v2_prefill: " + message):
        trtllm_fmha_v2_prefill(**dict(out=out) | batch.arguments | change)
    assert bool((out == 7).all())


def test_errors_of_operands():
    batch = Drawn("cpu", "SEPARATE_Q_K_V", qo_lens=[5], kv_lens=[5])
    q, k, v = batch.arguments["qkv"]
    for qkv, error, message in [
        ((q, k), ValueError, "qkv: got 2, wanted 3"),
        ((q[:, :3], k, v), ValueError, "q: got 3 heads, wanted a multiple of the 2 of keys"),
        ((q, k, v[:4]), ValueError, "v: got"),
        ((q, k.half(), v.half()), TypeError, "k: got torch.float16, wanted torch.float32 as q has"),
        ((q, k, v.half()), TypeError, "v: got torch.float16"),
        ((q.double(), k, v), TypeError, "q: got torch.float64"),
        ((q, None, v), TypeError, "k: got NoneType"),
    ]:
        with pytest.raises(error, match=f"trtllm_fmha_v2_prefill: {message}"):
            trtllm_fmha_v2_prefill(**batch.arguments | dict(qkv=qkv))
    with pytest.raises(GradientError):
        trtllm_fmha_v2_prefill(**batch.arguments | dict(qkv=(q.clone().requires_grad_(), k, v)))
    paged = Drawn("cpu", "Q_PAGED_KV_NHD")
    for change, error, message in [
        (dict(block_tables=None), ValueError, "block_tables: got None, wanted the pages"),
        (dict(block_tables=torch.zeros(3, 9).int()), ValueError, "block_tables: got"),
        (dict(block_tables=torch.zeros(4, 9)), TypeError, "block_tables: got torch.float32"),
        (
            dict(block_tables=torch.zeros(9, 4).int().t()),
            ValueError,
            "block_tables: got stride 4 of the last dimension",
        ),
        (dict(block_tables=torch.zeros(4, 2, 9).int()), ValueError, "block_tables: got"),
        (dict(qkv=(paged.q, paged.arguments["qkv"][1][:, :1])), ValueError, "kv_cache: got"),
        (dict(input_layout="CONTIGUOUS_Q_KV"), ValueError, "kv: got 5 dimensions, wanted 4"),
        (dict(input_layout="PACKED_QKV"), TypeError, "qkv: got tuple"),
    ]:
        with pytest.raises(error, match=f"trtllm_fmha_v2_prefill: {message}"):
            trtllm_fmha_v2_prefill(**paged.arguments | change)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the host reads a tensor on the CPU")
def test_a_soft_cap_needs_a_number_of_the_scale():
    batch = Drawn("cuda", "SEPARATE_Q_K_V")
    with pytest.raises(UnsupportedError, match="bmm1_scale: got a tensor on cuda.* with a soft cap, wanted a number"):
        trtllm_fmha_v2_prefill(
            **batch.arguments | dict(bmm1_scale=torch.ones(1, device="cuda")), logits_soft_cap_scale=1.0
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, kv_dtype, dim", [(BF16, BF16, 128), (F16, E4M3, 128), (BF16, BF16, 256), (BF16, BF16, 512)]
)
def test_head_sizes(dtype, kv_dtype, dim, device):
    batch = Drawn(device, "Q_PAGED_KV_HND", dtype, kv_dtype, heads=(8, 1), dim=dim)
    checked(batch, batch.wanted(causal=True))
    checked(batch, batch.wanted(chunk_masks(batch, 64)), mask_mode="chunked", chunked_attention_size=64)
