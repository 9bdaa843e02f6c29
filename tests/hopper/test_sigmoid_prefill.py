"""FlashSigmoid in Hopper's kernels, which transform the logits of two keys at once, against float64."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.support.attention_modules import SIGMOID_PARAMETERS
from tests.support.attention_oracle import assert_near, batch_attention, drawn, indptr_of, workspace

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wanted a GPU of compute capability 9.0",
)


@pytest.mark.parametrize("dtype, dim", [(torch.float16, 64), (torch.bfloat16, 128)])
def test_weights_large_and_small_and_nan(dtype, dim):
    header = "#include <flashinfer/attention/variants.h>\n"
    args = "sigmoid_pairs", *(dtype,) * 3, torch.int32, dim, dim, *SIGMOID_PARAMETERS, "FlashSigmoid", header
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cuda"), backend="fa3", jit_args=args)
    qo_lens, kv_lens = [70, 300, 1], [333, 700, 90]
    q = drawn((sum(qo_lens), 4, dim), dtype, "cuda")
    k, v = (drawn((sum(kv_lens), 2, dim), dtype, "cuda") for _ in range(2))
    requests = list(zip(*(x.cpu().split(kv_lens) for x in (k, v)), strict=True))
    for causal in (False, True):
        wrapper.plan(indptr_of(qo_lens), indptr_of(kv_lens), 4, 2, dim, causal=causal, q_data_type=dtype)
        # Weights of 1, of 0, of about 2^-8, and so small that the product of two underflows.
        for scale, bias in ((0.125, -5.5), (40.0, 0.0), (-40.0, 3.0), (0.1, -60.0)):

            def weights(x: torch.Tensor, scale: float = scale, bias: float = bias) -> torch.Tensor:
                return torch.sigmoid(x * scale + bias)

            want, _ = batch_attention(q, qo_lens, requests, causal=causal, weights=weights)
            got = wrapper.run(q, k, v, scale, bias)
            if bias > -60:
                assert_near(got, want, tolerance=4e-3 if dtype == torch.float16 else 2e-2)
            else:
                assert bool((got.double().abs() < 1e-15).all())
        poisoned = q.clone()
        poisoned[7, 1, 5] = torch.nan
        got = wrapper.run(poisoned, k, v, 0.125, -2.0)
        assert got[7, 1].isnan().all() and int(got.isnan().sum()) == dim
