"""Prefill with custom variants."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.support.attention_oracle import (
    assert_near,
    attention,
    batch_attention,
    workspace,
)

from .test_prefill import Batch, forms, single

SIGMOID = """
struct MySigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t qo_len, kv_len, window_left;
  float scale_log2, bias_log2;
  template <typename Params>
  FLASHINFER_HD MySigmoid(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)), window_left(kv_len) {
    scale_log2 = params.logits_scale * math::log2e, bias_log2 = params.sigmoid_bias * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.0f + math::ptx_exp2(-(logits * scale_log2 + bias_log2)));
  })
};
"""


def sigmoid(*index: object) -> tuple:
    return ("my_sigmoid", "float16", "float16", "float16", *index, 64, 64, [], [], ["logits_scale", "sigmoid_bias"],
            ["double", "double"], "MySigmoid", SIGMOID)  # fmt: skip


@forms
def test_a_custom_variant(form, small):
    batch = Batch(small, form, [5, 0, 40, 2], [9, 7, 130, 1200], (4, 2))
    kind = type(batch.wrapper)
    batch.wrapper = kind(workspace(small[0]), jit_args=sigmoid("int32"))
    weights = lambda logits: torch.sigmoid(logits * 0.1 - 2)  # noqa: E731
    for causal in (False, True):
        batch.plan(causal=causal)
        out = batch.wrapper.run(batch.q, *batch.inputs, 0.1, -2.0)
        want, _ = batch_attention(batch.q, batch.qo_lens, batch.requests, causal=causal, weights=weights)
        assert_near(out, want)
    with pytest.raises(ValueError, match="pos_encoding_mode, logits_soft_cap: got one with jit_args"):
        batch.plan(pos_encoding_mode="ALIBI")


def test_a_custom_variant_for_one_request(small):
    device = small[0]
    module = flashinfer.gen_customize_single_prefill_module("fa2", *sigmoid(), device=device).build_and_load()
    q, k, v = single(small, 20, 90, (4, 2))
    function = flashinfer.single_prefill_with_kv_cache_with_jit_module
    for mode in (0, 1):
        out = function(module, q, k, v, 0.1, -2.0, mask_mode=mode)
        want, _ = attention(q, k, v, causal=bool(mode), weights=lambda logits: torch.sigmoid(logits * 0.1 - 2))
        assert_near(out, want)
    windowed, _ = attention(q, k, v, window_left=4, weights=lambda logits: torch.sigmoid(logits * 0.1 - 2))
    assert_near(function(module, q, k, v, 0.1, -2.0, window_left=4), windowed)
    with pytest.raises(ValueError, match="mask_mode: got 2, wanted 0 or 1"):
        function(module, q, k, v, 0.1, -2.0, mask_mode=2)
    with pytest.raises(TypeError, match="with_jit_module: window_left: got 4.5, wanted an integer"):
        function(module, q, k, v, 0.1, -2.0, window_left=4.5)
    with pytest.raises(TypeError, match="jit_module: got NoneType, wanted the result of build_and_load"):
        function(None, q, k, v)
    with pytest.raises(TypeError, match="missing value for argument 'sigmoid_bias'"):
        function(module, q, k, v, 0.1)
