"""The decode family against float64 attention: forms of caches, options, plans, errors."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer
from flashinfer.utils import get_alibi_slopes, get_indptr
from tests.support.attention_oracle import (
    PLACES,
    Paged,
    alibi_slopes,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    workspace,
)

from ..support.plans import num_partial_states

OPTIONS = [
    dict(),
    dict(window_left=5),
    dict(window_left=0),
    dict(sm_scale=0.3),
    dict(logits_soft_cap=5.0),
    dict(pos_encoding_mode="ALIBI"),
    dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=1e5),
    dict(pos_encoding_mode="ROPE_LLAMA", window_left=17),
]


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}".replace("torch.", ""))
def place(request):
    return request.param


@pytest.fixture
def small(device):
    """Return arguments of modules that other tests use too."""
    return (device, torch.float16, 64)


def planned(paged: Paged, place, heads: tuple[int, int], layout: str = "NHD", near: bool = True, **options):
    device, dtype, head_dim = place
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    tables = paged.tables_on("cpu" if near else device)
    wrapper.plan(*tables, *heads, head_dim, paged.page_size, **{"q_data_type": dtype} | options)
    return wrapper


def wanted(q: torch.Tensor, paged: Paged, **options):
    requests = [paged.request(b) for b in range(len(q))]
    return batch_attention(q, [1] * len(q), requests, **options)


# One request


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 7), (12, 4), (17, 1), (32, 8)], ids=str)
def test_single(heads, layout, place):
    device, dtype, head_dim = place
    for kv_len in (1, random.randint(2, 100), random.randint(1000, 2000)):
        q = drawn((heads[0], head_dim), dtype, device)
        k, v = drawn((kv_len, heads[1], head_dim), dtype, device), drawn((kv_len, heads[1], head_dim), dtype, device)
        want, want_lse = attention(q[None], k, v)
        if layout == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, layout, return_lse=True)
        assert out.dtype == dtype
        assert_near(out[None], want, lse[None], want_lse)
        assert torch.equal(flashinfer.single_decode_with_kv_cache(q, k, v, layout), out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_single_options(options, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = drawn((12, 64), dtype, device), drawn((200, 3, 64), dtype, device), drawn((200, 3, 64), dtype, device)
    want, want_lse = attention(q[None], k, v, **options)
    out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, return_lse=True, **options)
    assert_near(out[None], want, lse[None], want_lse)


def test_single_without_keys(place):
    device, dtype, head_dim = place
    q, none = drawn((8, head_dim), dtype, device), drawn((0, 2, head_dim), dtype, device)
    out, lse = flashinfer.single_decode_with_kv_cache(q, none, none, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


def test_single_of_any_strides(place):
    device, dtype, head_dim = place
    q = drawn((8, 2 * head_dim), dtype, device)[:, ::2]
    kv = drawn((70, 2, 2, head_dim + 3), dtype, device)
    k, v = kv[:, 0, :, :head_dim], kv[:, 1, :, 3:]
    want, _ = attention(q[None], k, v)
    assert_near(flashinfer.single_decode_with_kv_cache(q, k, v)[None], want)
    shifted = drawn((8 * head_dim + 1,), dtype, device)[1:].view(8, head_dim)
    assert_near(flashinfer.single_decode_with_kv_cache(shifted, k, v)[None], attention(shifted[None], k, v)[0])
    turned = drawn((2, head_dim, 70), dtype, device)
    got = flashinfer.single_decode_with_kv_cache(q, turned.transpose(1, 2), turned.transpose(1, 2), "HND")
    nhd = turned.permute(2, 0, 1)
    assert_near(got[None], attention(q[None], nhd, nhd)[0])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_single_fp8(kv_dtype, device):
    q, k, v = drawn((8, 64), torch.float16, device), drawn((90, 2, 64), kv_dtype), drawn((90, 2, 64), kv_dtype)
    want, want_lse = attention(q[None], k.float() * 0.5, v.float() * 3.0)
    arguments = (q, k.to(device), v.to(device))
    scales = [(0.5, 3.0), (torch.tensor(0.5), torch.tensor([3.0]))]
    scales += [(torch.tensor([0.5], device=device), torch.tensor(3.0, device=device))]
    scales += [(torch.tensor([0.5, 0.5], device=device), torch.tensor([3.0, 3.0], device=device))]
    for k_scale, v_scale in scales:
        out, lse = flashinfer.single_decode_with_kv_cache(*arguments, k_scale=k_scale, v_scale=v_scale, return_lse=True)
        assert_near(out[None], want, lse[None], want_lse)
    want, want_lse = attention(
        q[None] * 2, k.float() * torch.tensor([[0.25], [1.0]]), v.float() * torch.tensor([[2.0], [5.0]])
    )
    out, lse = flashinfer.single_decode_with_kv_cache(
        *arguments, q_scale=2.0, k_scale=torch.tensor([0.25, 1.0]), v_scale=torch.tensor([2.0, 5.0]), return_lse=True
    )
    assert_near(out[None], want, lse[None], want_lse)


# Batches


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("form", ["one", "pair", "torn"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch(layout, form, page_size, place):
    device, dtype, head_dim = place
    lens = [random.choice([0, 1, page_size, random.randint(2, 100), random.randint(100, 500)]) for _ in range(7)]
    paged = Paged(lens, page_size, 2, head_dim, dtype, device, layout, form, shared=random.random() < 0.5)
    near = random.random() < 0.5
    wrapper = planned(paged, place, (8, 2), layout, near)
    for _ in range(2):  # two layers of one plan
        q = drawn((7, 8, head_dim), dtype, device)
        out, lse = wrapper.run(q, paged.cache, return_lse=True)
        assert_near(out, *wanted(q, paged)[:1], lse, wanted(q, paged)[1])
        again, lse_again = wrapper.run_return_lse(q, paged.cache)
        assert torch.equal(again, out) and torch.equal(lse_again, lse), "the same inputs, other bits"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batch_options(options, device):
    place = (device, torch.float32 if device == "cpu" else torch.float16, 64)
    paged = Paged([0, 1, 40, 333], 16, 3, 64, place[1], device)
    q = drawn((4, 12, 64), place[1], device)
    want, want_lse = wanted(q, paged, **options)
    out, lse = planned(paged, place, (12, 3), **options).run(q, paged.cache, return_lse=True)
    assert_near(out, want, lse, want_lse)
    plain = planned(paged, place, (12, 3))
    out, lse = plain.forward_return_lse(q, paged.cache, **options)
    assert_near(out, want, lse, want_lse)
    assert_near(plain.forward(q, paged.cache), wanted(q, paged)[0])


def test_batch_fp8(device):
    place = (device, torch.float16, 64)
    paged = Paged([3, 0, 77], 3, 2, 64, torch.float8_e4m3fn, device, form="pair")
    q = drawn((3, 8, 64), torch.float16, device)
    requests = [(k * 0.25, v * 4) for k, v in (paged.request(b) for b in range(3))]
    want, want_lse = batch_attention(q * 2, [1] * 3, requests)
    wrapper = planned(paged, place, (8, 2), kv_data_type=torch.float8_e4m3fn)
    for of in (float, lambda x: torch.tensor(x, device=device)):
        out, lse = wrapper.run(q, paged.cache, q_scale=of(2.0), k_scale=of(0.25), v_scale=of(4.0), return_lse=True)
        assert_near(out, want, lse, want_lse)


def test_results_are_written_to_arguments(small):
    device, dtype, head_dim = small
    paged = Paged([5, 0, 50], 16, 2, head_dim, dtype, device)
    wrapper, q = planned(paged, small, (4, 2)), drawn((3, 4, head_dim), dtype, device)
    padded = torch.full((3, 4, 2 * head_dim), math.nan, dtype=dtype, device=device)
    out, lse = padded[..., :head_dim], torch.full((3, 4), math.nan, device=device)
    assert wrapper.run(q, paged.cache, out=out, lse=lse) is out
    assert_near(out, *wanted(q, paged)[:1], lse, wanted(q, paged)[1])
    assert bool(padded[..., head_dim:].isnan().all()), "something was written outside the output"


def test_split_keys_change_nothing_beyond_rounding(place):
    device, dtype, head_dim = place
    paged = Paged([4000, 0, 1, 900, 70], 16, 1, head_dim, dtype, device)
    q = drawn((5, 4, head_dim), dtype, device)
    wrapper = planned(paged, place, (4, 1))
    assert num_partial_states(wrapper) > 1, "nothing was split"
    out, lse = wrapper.run(q, paged.cache, return_lse=True)
    want, want_lse = wanted(q, paged)
    assert_near(out, want, lse, want_lse)
    whole = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    whole.plan(*paged.tables_on("cpu"), 4, 1, head_dim, 16, q_data_type=dtype, disable_split_kv=True)
    assert num_partial_states(whole) == 0
    assert_near(whole.run(q, paged.cache), want)
    assert torch.equal(out, wrapper.run(q, paged.cache)), "the same inputs, other bits"


def test_an_empty_batch(small):
    device, dtype, head_dim = small
    paged = Paged([], 16, 2, head_dim, dtype, device)
    out, lse = planned(paged, small, (4, 2)).run(drawn((0, 4, head_dim), dtype, device), paged.cache, return_lse=True)
    assert out.shape == (0, 4, head_dim) and lse.shape == (0, 4)


def test_tables_may_change_after_the_plan(small):
    device, dtype, head_dim = small
    paged = Paged([40, 7], 16, 2, head_dim, dtype, device)
    tables = paged.tables_on("cpu")
    wrapper, q = (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)),
        drawn((2, 4, head_dim), dtype, device),
    )
    wrapper.plan(*tables, 4, 2, head_dim, 16, q_data_type=dtype)
    for table in tables:
        table.fill_(1 << 30)
    assert_near(wrapper.run(q, paged.cache), wanted(q, paged)[0])


def test_dtypes_of_a_plan(small):
    device, dtype, head_dim = small
    paged = Paged([40, 7], 16, 2, head_dim, dtype, device)
    q = drawn((2, 4, head_dim), dtype, device)
    for options in (
        dict(q_data_type="float16"),
        dict(q_data_type=None, data_type=torch.float16),
        dict(kv_data_type=dtype),
    ):
        assert_near(planned(paged, small, (4, 2), **options).run(q, paged.cache), wanted(q, paged)[0])


# Custom variants

SHIFTED = """
struct Shifted : AttentionVariantBase {
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  template <typename Params>
  FLASHINFER_HD Shifted(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)), sm_scale_log2(math::log2e) {
    window_left = kv_len;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits * params.scale + params.bias[qo_head_idx];
  })
};
"""


def shifted(device: str, *index: object) -> tuple:
    return ("shifted", "float16", "float16", "float16", *index, 64, 64, ["bias"], ["float"], ["scale"], ["double"],
            "Shifted", SHIFTED)  # fmt: skip


def test_a_custom_variant(small):
    device, dtype, head_dim = small
    paged = Paged([40, 0, 900], 16, 2, head_dim, dtype, device)
    q, bias = drawn((3, 4, head_dim), dtype, device), torch.randn(4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=shifted(device, "int32"))
    wrapper.plan(*paged.tables_on(device), 4, 2, head_dim, 16, q_data_type=dtype)
    want, want_lse = wanted(q, paged, sm_scale=0.2)
    out, lse = wrapper.run(q, paged.cache, bias, 0.2, return_lse=True)
    assert_near(out, want, lse, want_lse + bias.cpu() / math.log(2))
    assert_near(wrapper.run(q, paged.cache, bias, 0.2, v_scale=2.0), want * 2)
    module = flashinfer.gen_customize_single_decode_module(*shifted(device), device=device).build_and_load()
    k, v = (x.to(dtype).to(device) for x in paged.request(2))
    out, lse = flashinfer.single_decode_with_kv_cache_with_jit_module(module, q[2], k, v, bias, 0.2, return_lse=True)
    assert_near(out[None], want[2:], lse[None], want_lse[2:] + bias.cpu() / math.log(2))
    for args, message in (((bias,), "missing value for argument 'scale'"), ((bias, 0.2, 1), "but received")):
        with pytest.raises(TypeError, match=message):
            wrapper.run(q, paged.cache, *args)
    with pytest.raises(TypeError, match="bias: got float16, wanted float32"):
        wrapper.run(q, paged.cache, bias.half(), 0.2)
    with pytest.raises(ValueError, match=r"bias: got a tensor of torch.sparse_coo, wanted a dense one"):
        wrapper.run(q, paged.cache, bias.to_sparse(), 0.2)
    with pytest.raises(ValueError, match="k_scale: got float, wanted None: the custom variant"):
        wrapper.run(q, paged.cache, bias, 0.2, k_scale=2.0)
    with pytest.raises(ValueError, match="logits_soft_cap: got one with jit_args"):
        wrapper.plan(*paged.tables_on(device), 4, 2, head_dim, 16, logits_soft_cap=5.0)
    with pytest.raises(TypeError, match="with_jit_module: window_left: got 4.5, wanted an integer"):
        flashinfer.single_decode_with_kv_cache_with_jit_module(module, q[2], k, v, bias, 0.2, window_left=4.5)
    with pytest.raises(TypeError, match="jit_module: got int, wanted the result of build_and_load"):
        flashinfer.single_decode_with_kv_cache_with_jit_module(3, q[2], k, v)


# Helpers that decode and prefill share


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 17, 40])
def test_alibi_slopes(heads):
    torch.testing.assert_close(get_alibi_slopes(heads).double(), alibi_slopes(heads), rtol=1e-6, atol=0)


def test_indptr_of_lengths():
    assert get_indptr(torch.tensor([3, 0, 4])).tolist() == indptr_of([3, 0, 4]).tolist() == [0, 3, 3, 7]
    with pytest.raises(ValueError, match="n_heads: got 0, wanted a positive number"):
        get_alibi_slopes(0)
