"""The prefill family against float64 attention: masks, layouts, ragged and paged batches."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer
from flashinfer._attention.signature import CallArguments, Parameters
from flashinfer.errors import GradientError
from tests.support.attention_oracle import (
    PLACES,
    Paged,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    multi_item_mask,
    token_positions,
    workspace,
)
from tests.support.opcheck import opcheck

from ..support.plans import num_partial_states

OPTIONS = [
    dict(window_left=5),
    dict(causal=True, window_left=0),
    dict(causal=True, window_left=33),
    dict(sm_scale=0.3),
    dict(causal=True, logits_soft_cap=5.0),
    dict(causal=True, pos_encoding_mode="ALIBI"),
    dict(pos_encoding_mode="ALIBI"),
    dict(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=1e5),
]


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}".replace("torch.", ""))
def place(request):
    return request.param


def single(place, qo_len: int, kv_len: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    device, dtype, head_dim = place
    shapes = [(qo_len, heads[0], head_dim), *[(kv_len, heads[1], head_dim)] * 2]
    return [drawn(shape, dtype, device) for shape in shapes]


class Batch:
    """A ragged or paged batch with one interface to plan and run it."""

    def __init__(self, place, form: str, qo_lens: list[int], kv_lens: list[int], heads: tuple[int, int],
                 layout: str = "NHD", page_size: int = 16) -> None:  # fmt: skip
        self.place, self.form, self.heads, self.qo_lens, self.kv_lens = place, form, heads, qo_lens, kv_lens
        device, dtype, head_dim = place
        self.q = drawn((sum(qo_lens), heads[0], head_dim), dtype, device)
        if form == "ragged":
            k, v = (drawn((sum(kv_lens) + 3, heads[1], head_dim), dtype) for _ in range(2))
            self.requests = list(zip(*(x[: sum(kv_lens)].split(kv_lens) for x in (k, v)), strict=True))
            for x in (k, v):
                x[sum(kv_lens) :] = math.nan
            self.inputs = [
                x.to(device) if layout == "NHD" else x.transpose(0, 1).contiguous().to(device) for x in (k, v)
            ]
            self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
            self.tables = [indptr_of(kv_lens)]
            self.shape = (*heads, head_dim)
        else:
            self.paged = Paged(kv_lens, page_size, heads[1], head_dim, dtype, device, layout, form)
            self.requests = [self.paged.request(b) for b in range(len(kv_lens))]
            self.inputs = [self.paged.cache]
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
            self.tables = list(self.paged.tables_on("cpu"))
            self.shape = (*heads, head_dim, page_size)

    def plan(self, **options) -> None:
        far = random.choice(["cpu", self.place[0]])
        tables = [x.to(far) for x in (indptr_of(self.qo_lens), *self.tables)]
        self.wrapper.plan(*tables, *self.shape, **{"q_data_type": self.place[1]} | options)

    def check(self, masks=None, **options) -> None:
        want, want_lse = batch_attention(self.q, self.qo_lens, self.requests, masks, **options)
        out, lse = self.wrapper.run(self.q, *self.inputs, return_lse=True)
        assert_near(out, want, lse, want_lse)
        again, lse_again = self.wrapper.run_return_lse(self.q, *self.inputs)
        assert torch.equal(again, out) and torch.equal(lse_again, lse), "the same inputs, other bits"


forms = pytest.mark.parametrize("form", ["ragged", "one"])


# One request


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 7), (17, 1)], ids=str)
def test_single(heads, layout, causal, place):
    for qo_len, kv_len in ((1, 1), (random.randint(2, 70), random.randint(70, 300)), (40, 40), (33, 5), (3, 1500)):
        q, k, v = single(place, qo_len, kv_len, heads)
        want, want_lse = attention(q, k, v, causal=causal)
        if layout == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=causal, kv_layout=layout)
        assert out.dtype == q.dtype
        assert_near(out, want, lse, want_lse)
        assert torch.equal(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=causal, kv_layout=layout), out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_single_options(options, device):
    place = (device, torch.float32 if device == "cpu" else torch.float16, 64)
    q, k, v = single(place, 70, 200, (12, 3))
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **options)
    want, want_lse = attention(q, k, v, **options)
    assert_near(out, want, lse, want_lse)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_single_without_queries_or_keys(lengths, place):
    q, k, v = single(place, *lengths, (8, 2))
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and bool((out == 0).all()) and bool((lse == -math.inf).all())


def test_queries_before_the_first_key_see_nothing(place):
    q, k, v = single(place, 20, 6, (4, 2))
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    assert bool((out[:14] == 0).all()) and bool((lse[:14] == -math.inf).all()) and bool(lse[14:].isfinite().all())


def test_single_of_any_strides(place):
    device, dtype, head_dim = place
    qkv = drawn((50, 3, 4, head_dim + 5), dtype, device)
    q, k, v = qkv[:, 0, :, :head_dim], qkv[:, 1, :2, 5:], qkv[:, 2, 2:, :head_dim]
    assert_near(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True), attention(q, k, v, causal=True)[0])
    turned = drawn((4, head_dim, 50), dtype, device).permute(2, 0, 1)
    assert_near(flashinfer.single_prefill_with_kv_cache(turned, turned, turned), attention(turned, turned, turned)[0])


def test_heads_of_values_of_another_size(device):
    q, k = drawn((30, 4, 192), torch.bfloat16, device), drawn((90, 2, 192), torch.bfloat16, device)
    v = drawn((90, 2, 128), torch.bfloat16, device)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    want, want_lse = attention(q, k, v, causal=True)
    assert_near(out, want, lse, want_lse)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr_of([10, 20]), indptr_of([30, 60]), 4, 2, 192, 128, causal=True, q_data_type="bfloat16")
    requests = list(zip(k.split([30, 60]), v.split([30, 60]), strict=True))
    assert_near(wrapper.run(q, k, v), batch_attention(q, [10, 20], requests, causal=True)[0])
    paged = Paged([30, 60], 16, 2, 192, torch.bfloat16, device, form="pair", head_dim_vo=128)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr_of([10, 20]), *paged.tables_on("cpu"), 4, 2, 192, 16, 128, q_data_type="bfloat16")
    assert_near(wrapper.run(q, paged.cache), batch_attention(q, [10, 20], [paged.request(b) for b in range(2)])[0])


def test_output_of_another_dtype(small):
    q, k, v = single(small, 9, 40, (4, 2))
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, o_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert_near(out, attention(q, k, v)[0])


@pytest.mark.parametrize(
    "dtype, kv_dtype, head_dim",
    [
        (torch.float16, torch.float8_e4m3fn, 64),
        pytest.param(torch.float16, torch.float8_e5m2, 64, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, 128, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8(dtype, kv_dtype, head_dim, device):
    q = drawn((30, 8, head_dim), dtype, device)
    k, v = drawn((90, 2, head_dim), kv_dtype), drawn((90, 2, head_dim), kv_dtype)
    per_head = torch.tensor([[0.25], [0.5]]), torch.tensor([[2.0], [5.0]])
    for k_scale, v_scale in ((0.5, 3.0), per_head):
        want, want_lse = attention(q * 2, k.float() * k_scale, v.float() * v_scale, causal=True)
        scales = [x if isinstance(x, float) else x.flatten().to(device) for x in (k_scale, v_scale)]
        out, lse = flashinfer.single_prefill_with_kv_cache(
            q, k.to(device), v.to(device), 2.0, *scales, causal=True, return_lse=True
        )
        assert_near(out, want, lse, want_lse)
    paged = Paged([90, 0, 33], 3, 2, head_dim, kv_dtype, device, form="pair")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = (indptr_of([9, 1, 20]), *paged.tables_on("cpu"))
    wrapper.plan(*tables, 8, 2, head_dim, 3, causal=True, q_data_type=dtype, kv_data_type=kv_dtype)
    requests = [(k * 0.5, v * 3) for k, v in (paged.request(b) for b in range(3))]
    want, _ = batch_attention(q, [9, 1, 20], requests, causal=True)
    for of in (float, lambda x: torch.tensor(x, device=device)):
        assert_near(wrapper.run(q, paged.cache, k_scale=of(0.5), v_scale=of(3.0)), want)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_scales_of_ragged_keys(kv_dtype, device):
    """Numbers and tensors, one and one per head, through the bound and the full operator."""
    q = drawn((30, 8, 64), torch.float16, device)
    kv_dtype = kv_dtype or q.dtype
    k, v = (drawn((123, 2, 64), kv_dtype) for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr_of([9, 1, 20]), indptr_of([90, 0, 33]), 8, 2, 64, causal=True, kv_data_type=kv_dtype)
    by_head = torch.tensor([0.25, 0.5]), torch.tensor([2.0, 5.0])
    for k_scale, v_scale in ((0.5, 3.0), (torch.tensor(0.5), torch.tensor(3.0)), by_head):
        scaled = (
            x.float() * (s[:, None] if isinstance(s, torch.Tensor) and s.dim() else s)
            for x, s in ((k, k_scale), (v, v_scale))
        )
        requests = list(zip(*(x.split([90, 0, 33]) for x in scaled), strict=True))
        want, want_lse = batch_attention(q * 2, [9, 1, 20], requests, causal=True)
        scales = dict(q_scale=2.0, k_scale=k_scale, v_scale=v_scale)
        scales = {name: s.to(device) if isinstance(s, torch.Tensor) else s for name, s in scales.items()}
        for keys, values in ((k.to(device), v.to(device)), (k.to(device).mT.contiguous().mT, v.to(device))):
            out, lse = torch.full((30, 8, 64), 77.0, device=device).half(), torch.full((30, 8), 77.0, device=device)
            assert_near(wrapper.run(q, keys, values, **scales), want)
            wrapper.run(q, keys, values, **scales, out=out, lse=lse, return_lse=True)
            assert_near(out, want, lse, want_lse)
    if kv_dtype == q.dtype:
        with pytest.raises(
            GradientError, match=r"BatchPrefillWithRaggedKVCacheWrapper\.run: has no gradient with scales"
        ):
            wrapper.run(q.clone().requires_grad_(), k.to(device), v.to(device), k_scale=0.5)
    with pytest.raises(ValueError, match=r"k_scale: got shape \[3\], wanted one number or \[2\]"):
        wrapper.run(q, k.to(device), v.to(device), k_scale=torch.ones(3, device=device))


def test_single_custom_mask(place):
    q, k, v = single(place, 37, 75, (8, 2))
    mask = torch.rand(37, 75) < 0.3
    mask[5] = False
    want, want_lse = attention(q, k, v, mask=mask)
    far = mask.to(place[0])
    packed = flashinfer.packbits(far.view(-1), bitorder="little")
    for arguments in (
        dict(custom_mask=far),
        dict(custom_mask=far.T.contiguous().T),
        dict(custom_mask=far[None]),
        dict(custom_mask=far.flatten()),
        dict(packed_custom_mask=packed),
        dict(custom_mask=~far, packed_custom_mask=packed),
    ):
        out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, **arguments)
        assert_near(out, want, lse, want_lse)
    windowed, _ = attention(q, k, v, mask=mask, window_left=9)
    assert_near(flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=far, window_left=9), windowed)


# Batches


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["ragged", "one", "pair", "torn"])
def test_batch(form, layout, causal, place):
    kv_lens = [random.choice([0, 1, random.randint(2, 100), random.randint(100, 400)]) for _ in range(6)]
    qo_lens = [random.choice([0, 1, random.randint(1, 60)]) for _ in kv_lens]
    for page_size in (1, 3, 16) if form == "torn" else (16,):
        batch = Batch(place, form, qo_lens, kv_lens, (8, 2), layout, page_size)
        batch.plan(causal=causal)
        batch.check(causal=causal)


@forms
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batch_options(options, form, device):
    place = (device, torch.float32 if device == "cpu" else torch.float16, 64)
    batch = Batch(place, form, [5, 0, 40, 33], [0, 9, 150, 333], (12, 3))
    batch.plan(**options)
    batch.check(**options)
    batch.plan()
    want, want_lse = batch_attention(batch.q, batch.qo_lens, batch.requests, **options)
    out, lse = batch.wrapper.forward_return_lse(batch.q, *batch.inputs, **options)
    assert_near(out, want, lse, want_lse)
    assert_near(
        batch.wrapper.forward(batch.q, *batch.inputs), batch_attention(batch.q, batch.qo_lens, batch.requests)[0]
    )


@forms
def test_custom_masks_of_several_requests(form, place):
    batch = Batch(place, form, [7, 0, 33, 1, 12], [13, 8, 100, 0, 12], (8, 2))
    masks = [torch.rand(n, m) < 0.4 for n, m in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    flat = torch.cat([mask.view(-1) for mask in masks])
    bits = indptr_of([mask.numel() for mask in masks])
    packed, _ = flashinfer.segment_packbits(flat.to(place[0]), bits.to(place[0]), bitorder="little")
    for arguments in (dict(custom_mask=flat.to(place[0])), dict(custom_mask=flat), dict(packed_custom_mask=packed),
                      dict(custom_mask=~flat, packed_custom_mask=packed, causal=True)):  # fmt: skip
        batch.plan(**arguments)
        batch.check(masks)
    batch.plan(causal=True)  # the masks must have no more effect
    batch.check(causal=True)


@forms
@pytest.mark.parametrize("count", [1, 3])
def test_custom_masks_of_equal_requests(count, form, place):
    """Masks may have the shape of the requests. The transposed shape is an error."""
    batch = Batch(place, form, [7] * count, [13] * count, (8, 2))
    masks = torch.rand(count, 7, 13, device=place[0]) < 0.4
    shaped = masks[0] if count == 1 else masks
    for given in (shaped, shaped.mT.contiguous().mT, masks.flatten()):
        batch.plan(custom_mask=given)
        batch.check(list(masks.cpu()))
    wanted = str(list(shaped.shape)).replace("[", r"\[")
    for wrong in (shaped.mT.contiguous(), masks.flatten(0, 1)[None, None], masks.flatten(1)[..., None]):
        with pytest.raises(ValueError, match=rf"plan: custom_mask: got shape .*, wanted {wanted} or \[{91 * count}\]"):
            batch.plan(custom_mask=wrong)
        batch.check(list(masks.cpu()))


@forms
def test_multi_item_scoring(form, place):
    items = [[3, 1, 7], [5], [], [2, 2, 2, 2]]
    prefixes = [20, 1, 9, 40]
    kv_lens = [prefix + sum(n + 1 for n in lens) for prefix, lens in zip(prefixes, items, strict=True)]
    qo_lens = [kv_lens[0], 4, 9, kv_lens[3] - 10]
    batch = Batch(place, form, qo_lens, kv_lens, (8, 2))
    longest = 20
    arguments = dict(
        prefix_len_ptr=torch.tensor(prefixes, dtype=torch.int32).to(torch.uint32),
        token_pos_in_items_ptr=torch.cat([token_positions(lens, longest) for lens in items]),
        max_item_len_ptr=torch.tensor([max(lens, default=0) for lens in items], dtype=torch.int32).to(torch.uint16),
    )
    far = random.choice(["cpu", place[0]])
    masks = [multi_item_mask(*one) for one in zip(qo_lens, kv_lens, prefixes, items, strict=True)]
    unused = longest - (kv_lens[-1] - prefixes[-1])
    assert unused > 0
    for given in (arguments, arguments | dict(token_pos_in_items_ptr=arguments["token_pos_in_items_ptr"][:-unused])):
        batch.plan(token_pos_in_items_len=longest, causal=True, **{n: x.to(far) for n, x in given.items()})
        batch.check(masks)


@forms
def test_split_keys_change_nothing_beyond_rounding(form, place):
    batch = Batch(place, form, [3, 40, 1], [3000, 90, 1500], (4, 1))
    for causal in (False, True):
        batch.plan(causal=causal)
        assert num_partial_states(batch.wrapper) > 1, "nothing was split"
        batch.check(causal=causal)
        batch.plan(causal=causal, disable_split_kv=True)
        assert num_partial_states(batch.wrapper) == 0
        batch.check(causal=causal)


@forms
def test_an_empty_batch(form, small):
    batch = Batch(small, form, [], [], (4, 2))
    batch.plan(causal=True)
    out, lse = batch.wrapper.run(batch.q, *batch.inputs, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@forms
def test_a_cache_of_nothing(form, small):
    batch = Batch(small, form, [70, 3, 150], [0, 0, 0], (4, 2))
    batch.inputs = [x.new_empty((0, *x.shape[1:])) for x in batch.inputs]
    batch.plan(causal=True)
    batch.check(causal=True)


def test_ragged_keys_of_any_strides(small):
    device, dtype, head_dim = small
    batch = Batch(small, "ragged", [5, 20], [50, 70], (4, 2))
    batch.plan(causal=True)
    padded = drawn((123, 2, 2 * head_dim + 1), dtype, device)
    torn = [padded[..., :head_dim], padded[..., 1::2]]
    batch.requests = list(zip(*(x[:120].split([50, 70]) for x in torn), strict=True))
    batch.inputs = torn
    batch.check(causal=True)


def test_results_are_written_to_arguments(small):
    batch = Batch(small, "one", [5, 0, 20], [9, 7, 50], (4, 2))
    batch.plan(causal=True)
    padded = torch.full((25, 4, 128), math.nan, dtype=torch.float16, device=small[0])
    out, lse = padded[..., :64], torch.full((25, 4), math.nan, device=small[0])
    assert batch.wrapper.run(batch.q, *batch.inputs, out=out, lse=lse) is out
    want, want_lse = batch_attention(batch.q, batch.qo_lens, batch.requests, causal=True)
    assert_near(out, want, lse, want_lse)
    assert bool(padded[..., 64:].isnan().all()), "something was written outside the output"


# torch.compile


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_graph_of_one_request(head_dim, device):
    """Sizes are symbolic in a graph, and the graph may be the first user of the module."""

    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, lse = flashinfer.single_prefill_with_kv_cache(q * 2, k, k, causal=True, return_lse=True)
        return flashinfer.single_decode_with_kv_cache(out[-1], k, k) + lse[-1, :, None]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for qo_len, kv_len in ((3, 5), (7, 9), (8, 17)):
        q, k, _ = single((device, torch.bfloat16, head_dim), qo_len, kv_len, (4, 2))
        torch.testing.assert_close(compiled(q, k), layer(q, k), rtol=0, atol=0)


def test_one_graph_of_a_planned_run(small):
    batch = Batch(small, "one", [5, 0, 20], [9, 7, 50], (4, 2))
    batch.plan(causal=True)
    compiled = torch.compile(lambda q: batch.wrapper.run(q * 2, *batch.inputs) + 1, fullgraph=True, backend="aot_eager")
    want = batch.wrapper.run(batch.q * 2, *batch.inputs) + 1
    for _ in range(2):
        torch.testing.assert_close(compiled(batch.q), want, rtol=0, atol=0)


def test_the_operator_keeps_the_promises_of_its_schema(small):
    q, k, v = single(small, 9, 40, (4, 2))
    out, lse = torch.empty_like(q), torch.empty(9, 4, device=small[0])
    arguments = ("prefill", "op", "auto", q, k, v, out, lse, *CallArguments(mask_mode=1), *Parameters(sm_scale=0.125))
    opcheck(torch.ops.flashinfer.attend.default, arguments)


# Variants of one's own
