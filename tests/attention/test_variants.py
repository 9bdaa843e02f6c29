"""Custom variants from one header, through every function and wrapper that takes them, against float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch

import flashinfer

from ..support.attention_modules import (
    FLASH_SIGMOID,
    HOOKS,
    HOOKS_SCALARS,
    HOOKS_TENSORS,
    SIGMOID_PARAMETERS,
    relative_error,
)
from ..support.attention_oracle import Paged, assert_near, attention, batch_attention, drawn, indptr_of

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
SCALE, BIAS = 0.125, -1.5
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def workspace(device: str) -> torch.Tensor:
    return torch.empty(16 << 20, dtype=torch.uint8, device=device)


def customised(
    decl: str | Path, name: str, dtype: torch.dtype, *index: object, tensors=(), scalars=(), uri: str = "own"
):
    """Return arguments of ``gen_customize_*_module``. ``tensors`` and ``scalars`` are pairs of name and type."""
    names = [[one[at] for one in many] for many in (tensors, scalars) for at in (0, 1)]
    return (uri, dtype, dtype, dtype, *index, DIM, DIM, *names, name, decl)


def single_module(arguments: tuple, device: str):
    return flashinfer.gen_customize_single_prefill_module("auto", *arguments, device=device).build_and_load()


def single(module, q, k, v, *own, **options):
    return flashinfer.single_prefill_with_kv_cache_with_jit_module(module, q, k, v, *own, **options)


def inputs(dtype: torch.dtype, device: str, qo_len: int = 21, kv_len: int = 300):
    shapes = ((qo_len, HEADS, DIM), (kv_len, KV_HEADS, DIM), (kv_len, KV_HEADS, DIM))
    return tuple(drawn(shape, dtype, device) for shape in shapes)


def sigmoid_weights(logits: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits * SCALE + BIAS)


@pytest.fixture(autouse=True)
def unoptimised(monkeypatch):
    """Compile without optimisation on the CPU. It took more than half of these tests' time."""
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")


@pytest.fixture
def header(tmp_path) -> Path:
    path = tmp_path / "flash_sigmoid.cuh"
    path.write_text("#include <flashinfer/attention/variant_helper.cuh>\n" + FLASH_SIGMOID)
    return path


@pytest.fixture
def sigmoid(header, device):
    """Return ``jit_args`` without the dtype of indices. One dtype per device is enough for variants."""
    dtype = DTYPE[device]
    return lambda *index: (
        "flash_sigmoid", dtype, dtype, dtype, *index, DIM, DIM, *SIGMOID_PARAMETERS, "FlashSigmoid", header,
    )  # fmt: skip


@pytest.mark.parametrize("mask_mode", [0, 1])
def test_flash_sigmoid_of_one_request(mask_mode, sigmoid, device):
    dtype = DTYPE[device]
    module = single_module(sigmoid(), device)
    for qo_len, kv_len in ((21, 300), (1, 4000), (130, 130)):
        q, k, v = inputs(dtype, device, qo_len, kv_len)
        want, _ = attention(q, k, v, causal=bool(mask_mode), weights=sigmoid_weights)
        got = single(module, q, k, v, SCALE, BIAS, mask_mode=mask_mode)
        assert got.dtype == dtype and relative_error(got.cpu(), want) < LIMIT[dtype]
        assert torch.equal(single(module, q, k, v, SCALE, BIAS, mask_mode=mask_mode), got)


@pytest.mark.slow
def test_flash_sigmoid_of_the_library_saturates_and_keeps_nan(header, device):
    header.write_text("#include <flashinfer/attention/variants.h>\n")
    dtype, scalars = DTYPE[device], [(name, "double") for name in SIGMOID_PARAMETERS[2]]
    module = single_module(customised(header, "FlashSigmoid", dtype, scalars=scalars, uri="library_sigmoid"), device)
    q, k, v = inputs(dtype, device, 70, 333)
    for scale, bias in ((0.125, -5.5), (40.0, 0.0), (-40.0, 3.0)):
        want, _ = attention(q, k, v, weights=lambda x, scale=scale, bias=bias: torch.sigmoid(x * scale + bias))
        assert relative_error(single(module, q, k, v, scale, bias).cpu(), want) < LIMIT[dtype]
    q[7, 1, 5] = torch.nan
    got = single(module, q, k, v, SCALE, BIAS)
    assert got[7, 1].isnan().all() and got.isnan().sum() == DIM


def test_flash_sigmoid_of_one_decode(sigmoid, device):
    dtype = DTYPE[device]
    module = flashinfer.gen_customize_single_decode_module(*sigmoid(), device=device).build_and_load()
    q, k, v = inputs(dtype, device, 1, 3000)
    got = flashinfer.single_decode_with_kv_cache_with_jit_module(module, q[0], k, v, SCALE, BIAS)
    assert relative_error(got[None].cpu(), attention(q, k, v, weights=sigmoid_weights)[0]) < LIMIT[dtype]


def test_flash_sigmoid_of_a_decoded_batch(sigmoid, device):
    dtype = DTYPE[device]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=sigmoid("int32"))
    for lens in ([40, 0, 3000, 1], [5] * 9):
        paged = Paged(lens, PAGE, KV_HEADS, DIM, dtype, device)
        wrapper.plan(*paged.tables_on(device), HEADS, KV_HEADS, DIM, PAGE, q_data_type=dtype, kv_data_type=dtype)
        q = drawn((len(lens), HEADS, DIM), dtype, device)
        requests = [paged.request(b) for b in range(len(lens))]
        want, _ = batch_attention(q, [1] * len(lens), requests, weights=sigmoid_weights)
        assert relative_error(wrapper.run(q, paged.cache, SCALE, BIAS).cpu(), want) < LIMIT[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_flash_sigmoid_of_prefilled_batches(causal, sigmoid, device):
    dtype = DTYPE[device]
    qo_lens, kv_lens = [5, 0, 33, 1], [40, 7, 1500, 0]
    q = drawn((sum(qo_lens), HEADS, DIM), dtype, device)
    options = {"causal": causal, "q_data_type": dtype}
    paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, dtype, device)
    requests = [paged.request(b) for b in range(len(kv_lens))]
    want, _ = batch_attention(q, qo_lens, requests, causal=causal, weights=sigmoid_weights)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), jit_args=sigmoid("int32"), jit_kwargs={"use_sliding_window": False}
    )
    wrapper.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE, **options)
    assert relative_error(wrapper.run(q, paged.cache, SCALE, BIAS).cpu(), want) < LIMIT[dtype]
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), jit_args=sigmoid("int32"))
    ragged.plan(indptr_of(qo_lens), indptr_of(kv_lens), HEADS, KV_HEADS, DIM, **options)
    k, v = (torch.cat(parts).to(dtype).to(device) for parts in zip(*requests, strict=True))
    assert relative_error(ragged.run(q, k, v, SCALE, BIAS).cpu(), want) < LIMIT[dtype]


# --- every hook ---


def hooks_oracle(q, k, v, bias, documents, sm_scale: float, limit: float, period: int):
    qo_len, kv_len = q.shape[0], k.shape[0]
    q, k, v = q.cpu().double() * 2, k.cpu().double(), v.cpu().double()
    k = torch.where(k < 0, k, k * 0.5)
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k)
    if bias is not None:
        logits = logits + bias.cpu().double()[:, None, None] * (torch.arange(kv_len) % period)
    documents = documents.cpu()
    seen = documents[None, :] == documents[kv_len - qo_len :, None]
    weights = torch.softmax((logits * sm_scale).masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v).clamp(-limit, limit)


FAR = 2**40  # float32 drops a small number that is added to it


def test_every_hook_and_parameter(device):
    dtype = torch.float16
    text = HOOKS.replace("params.limit)", f"params.limit - {FAR})").replace(
        "params.period)", f"(params.period - {FAR}))"
    )
    arguments = customised(text, "Hooks", dtype, tensors=HOOKS_TENSORS, scalars=HOOKS_SCALARS, uri="hooks")
    module = single_module(arguments, device)
    q, k, v = inputs(dtype, device, 30, 700)
    documents = torch.randint(0, 4, (700,)).sort().values.to(torch.int32).to(device)
    bias = torch.randn(HEADS, device=device)
    for own_bias in (bias, None):
        got = single(module, q, k, v, own_bias, documents, 0.05, FAR + 0.1, FAR + 3)
        assert_near(got, hooks_oracle(q, k, v, own_bias, documents, 0.05, 0.1, 3), tolerance=4e-3)
        assert float(got.abs().max()) <= 0.1001
    nobody = torch.arange(700, dtype=torch.int32, device=device)
    nobody[-30:] = torch.arange(1000, 1030, device=device)
    out, lse = single(module, q, k, v, None, nobody, 0.05, FAR + 10.0, FAR + 3, return_lse=True)
    assert_near(out, v[-30:].cpu().double().repeat_interleave(2, 1))  # each query sees one key
    assert lse.isfinite().all()
    for parameters, error, message in (
        ((bias, None, 0.05, 0.1, 3), TypeError, "documents"),
        ((bias.half(), documents, 0.05, 0.1, 3), TypeError, "maybe_bias: got float16, wanted float32"),
        ((bias, documents[::2], 0.05, 0.1, 3), ValueError, "documents"),
        ((bias, documents, 0.05, 0.1, 2.5), TypeError, "period"),
        ((bias, documents, 0.05, 0.1), TypeError, "period"),
    ):
        with pytest.raises(error, match=message):
            single(module, q, k, v, *parameters)


MASKED = r"""
struct Masked : AttentionVariantBase {
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  uint8_t* bits;
  template <typename Params>
  __device__ __host__ Masked(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    bits = params.custom_mask;
    qo_len = params.get_qo_len(batch_idx), kv_len = params.get_kv_len(batch_idx), window_left = params.window;
    sm_scale_log2 = math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float scaled = logits * static_cast<float>(params.sm_scale);
    if (qo_idx < qo_len && kv_idx < kv_len)
      params.logits_of[qo_head_idx * (qo_len * kv_len) + qo_idx * kv_len + kv_idx] = scaled;
    return scaled;
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t offset = qo_idx * kv_len + kv_idx;
    return ((bits[offset / 8] >> (offset % 8)) & 1);
  })
};
"""


WGMMA_FORM = r"""
struct Biased : AttentionVariantBase {
  float scale_log2;
  int first_query;
  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Biased(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [a, b, c, d, e, qo_len, kv_len, batch_idx] = block_coord;
    scale_log2 = params.additional_params.sm_scale * math::log2e, first_query = kv_len - qo_len + batch_idx;
  }
  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/false>(scale_log2);
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    logits += params.additional_params.bias[qo_head_idx] * float(first_query + int(qo_idx) - int(kv_idx));
    return logits * scale_log2;
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, { return output * 2.0f; })
};
"""
WGMMA_SUMS = WGMMA_FORM.replace(
    "qo_head_idx, { return output * 2.0f;", "qo_head_idx, m, d, scale, {\n    return output * 2.0f / d;"
)


@pytest.mark.parametrize(
    "text", [WGMMA_FORM, pytest.param(WGMMA_SUMS, marks=pytest.mark.slow)], ids=["normalised", "sums"]
)
def test_the_form_of_hopper(text, device):
    """The form serves every backend. Constructor and hooks see the parameters in ``additional_params``."""
    dtype = torch.float16
    arguments = customised(
        text, "Biased", dtype, tensors=[("bias", "float")], scalars=[("sm_scale", "double")], uri="wgmma_form"
    )
    q, k, v = inputs(dtype, device, 30, 700)
    bias = 0.01 * torch.randn(HEADS, device=device)
    got, lse = single(single_module(arguments, device), q, k, v, bias, 0.11, return_lse=True)
    distance = (670 + torch.arange(30))[:, None] - torch.arange(700)
    keys, values = (x.cpu().double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.cpu().double(), keys) + bias.cpu().double()[:, None, None] * distance
    want = 2 * torch.einsum("hqk,khd->qhd", torch.softmax(0.11 * logits, -1), values)
    assert_near(got, want, tolerance=4e-3)
    want_lse = torch.logsumexp(0.11 * logits, -1).T / math.log(2)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-3)


NORMALISED = r"""
struct Normalised : AttentionVariantBase {
  uint32_t window_left, kv_len;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Normalised(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    kv_len = params.get_kv_len(batch_idx), window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return qo_idx != 1 || params.all != 0;
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    const float sink = params.sinks[qo_head_idx] * math::log2e, zero = 0.f, one = 1.f;
    const float own = m != -math::inf ? math::ptx_rcp(d + math::ptx_exp2(sink - m)) : zero;
    return output * scale * own * one;
  })
};
"""


@pytest.mark.parametrize("kv_len", [40, 2500])
def test_an_output_that_the_variant_normalises(kv_len, device):
    """The hook gets the sums of a row and their reference, with whole and with split keys. It adds a sink here."""
    dtype = torch.float16
    arguments = customised(
        NORMALISED, "Normalised", dtype, tensors=[("sinks", "float")],
        scalars=[("sm_scale", "double"), ("all", "int64_t")], uri="normalised",
    )  # fmt: skip
    module = single_module(arguments, device)
    q, k, v = inputs(dtype, device, 3, kv_len)
    sinks = torch.linspace(-2, 9, HEADS, device=device)
    keys, values = (x.cpu().double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = 0.3 * torch.einsum("qhd,khd->hqk", q.cpu().double(), keys)
    with_sinks = torch.cat([logits, sinks.cpu().double()[:, None, None].expand(-1, 3, 1)], -1)
    want = torch.einsum("hqk,khd->qhd", torch.softmax(with_sinks, -1)[..., :-1], values)
    want_lse = torch.logsumexp(logits, -1).T / math.log(2)
    got, lse = single(module, q, k, v, sinks, 0.3, 1, return_lse=True)
    assert_near(got, want, tolerance=4e-3)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-3)
    got, lse = single(module, q, k, v, sinks, 0.3, 0, return_lse=True)
    want[1], want_lse[1] = 0, -math.inf  # the query sees no key
    assert_near(got, want, tolerance=4e-3)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_outputs_of_sigmoid_attention_in_two_forms(device):
    """Without softmax, both forms of the hook get the same sums. The state is (0, 1)."""
    q, k, v = inputs(torch.float16, device, 3, 900)
    results = []
    for head, body in (("", "output"), ("m, d, scale, ", "m == 0.f ? output * math::ptx_rcp(d) : math::inf")):
        hook = (
            "  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, "
            f"{head}{{\n    return 2.f * ({body});\n  }})\n}};\n"
        )
        text = FLASH_SIGMOID.rstrip().removesuffix("};") + hook
        scalars = [(name, "double") for name in SIGMOID_PARAMETERS[2]]
        arguments = customised(text, "FlashSigmoid", torch.float16, scalars=scalars, uri=f"sigmoid_{len(head)}")
        results.append(single(single_module(arguments, device), q, k, v, SCALE, BIAS))
    want, _ = attention(q, k, v, weights=lambda x: 1 / (1 + torch.exp(-(x * SCALE + BIAS))))
    assert relative_error(results[0].cpu(), 2 * want) < 2e-2
    assert results[1].equal(results[0])


def test_a_mask_a_window_and_a_tensor_to_write_to(device):
    """A parameter may be called custom_mask, as in FlashInfer's examples. A call's window applies as well."""
    dtype, qo_len, kv_len = torch.float16, 12, 1500
    tensors = [("custom_mask", "uint8_t"), ("logits_of", "float")]
    scalars = [("sm_scale", "double"), ("window", "int64_t")]
    module = single_module(customised(MASKED, "Masked", dtype, tensors=tensors, scalars=scalars, uri="masked"), device)
    q, k, v = inputs(dtype, device, qo_len, kv_len)
    mask = torch.rand(qo_len, kv_len) < 0.3
    mask[5] = False
    packed = torch.from_numpy(numpy.packbits(mask.flatten().numpy(), bitorder="little")).to(device)
    products = torch.einsum("qhd,khd->hqk", q.cpu().double(), k.cpu().double().repeat_interleave(2, 1))
    for own_window, window_left in ((70, -1), (70, 9), (9, 70), (-1, -1), (-1, 40), (0, -1)):
        narrower = min(one for one in (own_window, window_left, kv_len) if one >= 0)
        logits = torch.full((HEADS, qo_len, kv_len), math.nan, device=device)
        out, lse = single(
            module, q, k, v, packed, logits, 0.2, own_window, window_left=window_left, mask_mode=1, return_lse=True
        )
        position, keys = torch.arange(kv_len - qo_len, kv_len)[:, None], torch.arange(kv_len)
        seen = (keys <= position) & (keys >= position - narrower)
        want, want_lse = attention(q, k, v, mask=mask & seen, sm_scale=0.2)
        assert_near(out, want, lse, want_lse)
        written = logits.cpu().double()
        torch.testing.assert_close(written[:, seen], 0.2 * products[:, seen], rtol=2e-3, atol=2e-3)


# --- names of variants ---


@pytest.mark.slow
def test_a_builtin_variant_by_name(device):
    """A user may name DefaultAttention with rotated queries and keys (pos_encoding_mode 1)."""
    dtype = torch.float16
    include, name = "#include<flashinfer/attention/variants.cuh>", "DefaultAttention<false, false, true, false>"
    cap = [("sm_scale", "double"), ("logits_soft_cap", "double")]
    arguments = (*customised(include, name, dtype, scalars=cap, uri="by_name"), 1)
    q, k, v = inputs(dtype, device)
    got = single(single_module(arguments, device), q, k, v, 0.2, 3.0, mask_mode=1)
    options = {"sm_scale": 0.2, "logits_soft_cap": 3.0, "pos_encoding_mode": "ROPE_LLAMA"}
    assert_near(got, attention(q, k, v, causal=True, **options)[0])


@pytest.mark.slow
def test_three_variants_of_one_name_in_one_process(header, device):
    """The library's FlashSigmoid, a user's variant of the same name, and the user's edited header coexist."""
    q, k, v = inputs(torch.float16, device, 3, 40)
    include = "#include <flashinfer/attention/variants.h>\n"
    results = []
    for text in (include, include + FLASH_SIGMOID.replace("1.f +", "3.f +"), FLASH_SIGMOID.replace("1.f +", "5.f +")):
        header.write_text(text)
        scalars = [(name, "double") for name in SIGMOID_PARAMETERS[2]]
        arguments = customised(header, "FlashSigmoid", torch.float16, scalars=scalars, uri="thrice")
        results.append(single(single_module(arguments, device), q, k, v, SCALE, BIAS).cpu())
    for got, c in zip(results, (1, 3, 5), strict=True):
        want, _ = attention(q, k, v, weights=lambda x, c=c: 1 / (c + torch.exp(-(x * SCALE + BIAS))))
        assert relative_error(got, want) < 2e-2


KNOWN = r"""
struct Known : AttentionVariantBase {
  uint32_t kv_len, window_left;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Known(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    kv_len = window_left = params.get_kv_len(batch_idx);
    sm_scale_log2 = math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float distance = static_cast<float>(static_cast<int>(kv_idx) - static_cast<int>(kv_len) + 1);
    return logits * static_cast<float>(params.sm_scale) + params.maybe_alibi_slopes[qo_head_idx] * distance;
  })
};
"""


def test_the_wrapper_passes_slopes_of_alibi(device):
    """FlashInfer's callers pass only the scale; maybe_alibi_slopes are the wrapper's."""
    dtype = torch.float16
    arguments = customised(
        KNOWN, "Known", dtype, torch.int32, tensors=[("maybe_alibi_slopes", "float")], scalars=[("sm_scale", "double")]
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=arguments)
    paged, q = Paged([5, 300], PAGE, KV_HEADS, DIM, dtype, device), drawn((2, HEADS, DIM), dtype, device)
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE, q_data_type=dtype)
    requests = [paged.request(b) for b in range(2)]
    want = batch_attention(q, [1, 1], requests, pos_encoding_mode="ALIBI", sm_scale=SCALE)[0]
    assert_near(wrapper.run(q, paged.cache, SCALE), want)
    zeros = torch.zeros(HEADS, device=device)
    assert_near(wrapper.run(q, paged.cache, zeros, SCALE), batch_attention(q, [1, 1], requests, sm_scale=SCALE)[0])
    with pytest.raises(TypeError, match="match the variant's parameters"):
        wrapper.run(q, paged.cache)


KNOWN_MASK = r"""
struct KnownMask : AttentionVariantBase {
  uint32_t kv_len, window_left;
  float sm_scale_log2;
  const uint8_t* bits;
  template <typename Params>
  __device__ __host__ KnownMask(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    kv_len = window_left = params.get_kv_len(batch_idx);
    sm_scale_log2 = params.sm_scale * math::log2e;
    bits = params.maybe_custom_mask + params.maybe_mask_indptr[batch_idx];
  }
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t at = qo_idx * kv_len + kv_idx;
    return (bits[at / 8] >> (at % 8)) & 1;
  })
};
"""


def test_the_wrapper_passes_its_mask(device):
    dtype, lens = torch.float16, ([4, 3], [9, 40])
    arguments = customised(
        KNOWN_MASK, "KnownMask", dtype, torch.int32, scalars=[("sm_scale", "double")],
        tensors=[("maybe_custom_mask", "uint8_t"), ("maybe_mask_indptr", "int32_t")],
    )  # fmt: skip
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=arguments)
    paged, q = Paged(lens[1], PAGE, KV_HEADS, DIM, dtype, device), drawn((7, HEADS, DIM), dtype, device)
    masks = [torch.rand(m, n) < 0.5 for m, n in zip(*lens, strict=True)]
    mask = torch.cat([one.flatten() for one in masks]).to(device)
    wrapper.plan(
        indptr_of(lens[0]), *paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE, custom_mask=mask, q_data_type=dtype
    )
    want = batch_attention(q, lens[0], [paged.request(b) for b in range(2)], masks, sm_scale=SCALE)[0]
    assert_near(wrapper.run(q, paged.cache, SCALE), want)
