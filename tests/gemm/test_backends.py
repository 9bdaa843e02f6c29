"""Questions of FlashInfer's callers: which backends and which GPUs a function serves."""

from __future__ import annotations

import pytest
import torch

from flashinfer.dsv3_ops import fused_topk_deepseek
from flashinfer.gemm import bmm_bf16, bmm_fp8, mm_bf16

SERVED = [(mm_bf16, "cublaslt"), (mm_bf16, "cudnn"), (mm_bf16, "tinygemm"), (bmm_bf16, "cudnn"), (bmm_fp8, "cublas"),
          (bmm_fp8, "cudnn"), *((function, "auto") for function in (mm_bf16, bmm_bf16, bmm_fp8))]  # fmt: skip


@pytest.mark.parametrize("function, backend", SERVED)
def test_a_backend_with_a_yes_computes(function, backend, device):
    assert function.is_backend_supported(backend) and function.is_backend_supported(backend, 90)
    dtype = torch.float8_e4m3fn if function is bmm_fp8 else torch.bfloat16
    a = torch.randn(2, 5, 24, device=device).to(dtype)
    b = torch.randn(2, 9, 24, device=device).to(dtype).transpose(1, 2)
    if function is mm_bf16:
        a, b = a[0], b[0]
    scales = [torch.tensor(scale, device=device) for scale in (0.5, 4.0)] if function is bmm_fp8 else []
    out = torch.full((*a.shape[:-1], 9), float("nan"), device=device, dtype=torch.bfloat16)
    kind = {"dtype": torch.bfloat16} if function is bmm_fp8 else {}
    function(a, b, *scales, out=out, backend=backend, **kind)
    want = a.double() @ b.double() * (2 if function is bmm_fp8 else 1)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("function", [mm_bf16, bmm_bf16, bmm_fp8, fused_topk_deepseek])
def test_a_no(function):
    assert not function.is_backend_supported("cutile") and not function.is_backend_supported("cutile", 90)
    assert not function.is_backend_supported("auto", 75)
    assert not function.is_compute_capability_supported(75) and function.is_compute_capability_supported(80)
    with pytest.raises(TypeError, match="is_compute_capability_supported: cc: got 9.0, wanted an integer"):
        function.is_compute_capability_supported(9.0)
    with pytest.raises(TypeError, match="is_backend_supported: cc: got tuple, wanted an integer"):
        function.is_backend_supported("auto", (9, 0))


def test_routing_has_one_backend():
    assert fused_topk_deepseek.is_backend_supported("default", 90) and not fused_topk_deepseek.is_backend_supported(
        "cake", 90
    )
