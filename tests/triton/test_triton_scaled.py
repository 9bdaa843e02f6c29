"""Activation, norms and products at FlashInfer's Triton addresses, against their definitions in float64."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer.triton
from flashinfer.triton import activation, norm, sm_constraint_gemm

FP8 = torch.float8_e4m3fn


def one(value: float, device: str) -> torch.Tensor:
    return torch.tensor([value], device=device)


def check(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor | float = 0.0) -> None:
    """Within half a unit in the last place of ``want`` and what float32 leaves of its terms."""
    info = torch.finfo(got.dtype)
    want = want.clamp(-info.max, info.max)
    smallest = info.smallest_normal * info.eps
    bound = want.abs() * info.eps * 0.5 + smallest + (want.abs() + terms) * 2**-20
    assert ((got.double().cpu() - want).abs() <= bound).all()


@pytest.mark.parametrize("given", [torch.bfloat16, FP8])
@pytest.mark.parametrize("wanted", [None, torch.float16, FP8])
def test_silu_and_mul(given, wanted, device):
    x = (torch.randn(3, 5, 34, device=device) * 2).to(given)
    got = activation.silu_and_mul(x, one(1.5, device), one(40.0, device), wanted)
    gate, value = (x.double().cpu() * 1.5).chunk(2, -1)
    assert got.dtype == (wanted or given)
    check(got, gate * gate.sigmoid() * value * 40)


def test_silu_and_mul_without_scales_is_the_librarys(dtype, device):
    x = torch.randn(7, 26, device=device).to(dtype)
    assert torch.equal(activation.silu_and_mul(x), flashinfer.silu_and_mul(x))
    gate, value = x.double().cpu().chunk(2, -1)
    check(activation.silu_and_mul(x, dtype=torch.float32), gate * gate.sigmoid() * value)


@pytest.mark.parametrize("wanted", [torch.float16, FP8])
def test_norms_with_scales(wanted, dtype, device):
    x, residual = torch.randn(4, 48, device=device).to(dtype), torch.randn(4, 48, device=device).to(dtype)
    weight = torch.rand(48, device=device).to(dtype)
    out = torch.full((4, 48), float("nan"), device=device).to(wanted)
    scaled = x.double().cpu() * 0.5

    def normalized(y: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().cpu() * 300

    norm.rms_norm(x, weight, out, 1e-5, one(0.5, device), one(300.0, device))
    check(out, normalized(scaled))
    total = residual.double().cpu() + scaled
    out.fill_(float("nan"))
    before = x.clone()
    norm.rms_norm_add_residual(x, residual, weight, 1e-5, out, one(0.5, device), one(300.0, device))
    check(out, normalized(total))
    check(residual, total)
    assert torch.equal(x, before)


def test_norms_without_scales_are_the_librarys(dtype, device):
    x, residual = torch.randn(4, 48, device=device).to(dtype), torch.randn(4, 48, device=device).to(dtype)
    weight, out = torch.rand(48, device=device).to(dtype), torch.empty(4, 48, device=device, dtype=dtype)
    norm.rms_norm(x, weight, out, 1e-6)
    assert torch.equal(out, flashinfer.rmsnorm(x, weight, 1e-6))
    y, sum_of = x.clone(), residual.clone()
    norm.rms_norm_add_residual(x, residual, weight, 1e-6)
    flashinfer.fused_add_rmsnorm(y, sum_of, weight, 1e-6)
    assert torch.equal(x, y) and torch.equal(residual, sum_of)


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, FP8])
@pytest.mark.parametrize("strided", [False, True])
def test_products(given, strided, device):
    a, b = torch.randn(9, 64, device=device).to(given), torch.randn(64, 48, device=device).to(given)
    if strided:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    c = torch.randn(9, 48, device=device).to(torch.float32 if given == torch.float32 else torch.bfloat16)
    product, terms = a.double().cpu() @ b.double().cpu(), a.double().cpu().abs() @ b.double().cpu().abs()
    plain = sm_constraint_gemm.gemm(a, b)
    assert plain.dtype == (torch.bfloat16 if given == FP8 else given)
    slack = 2**10 if given in (torch.float32, FP8) else 1  # tensor cores' sums, TF32's and those of eight bits
    check(plain, product, terms * slack)
    want = 0.5 * product + 2 * c.double().cpu()
    got = sm_constraint_gemm.gemm_persistent(a, b, c, 0.5, 2.0, num_sms=3)
    assert got is c
    check(c, want, terms * slack)
    c.fill_(float("nan"))
    sm_constraint_gemm.gemm_descriptor_persistent(a, b.t(), c, num_sms=1, EPILOGUE_SUBTILE=True)
    check(c, product, terms * slack)
    assert sm_constraint_gemm.gemm(a, b, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: activation.silu_and_mul(x[:, :3]), ValueError, "x: got shape [4, 3], wanted an even last"),
        (lambda x: activation.silu_and_mul(x, x[0]), ValueError, "x_scale: got 6 elements, wanted 1"),
        (lambda x: activation.silu_and_mul(x, None, x[0]), ValueError, "o_scale: got 6 elements, wanted 1"),
        (lambda x: norm.rms_norm(x, x[0, :2], x, 1e-6), ValueError, "weight: got shape [2], wanted [6]"),
        (lambda x: norm.rms_norm(x, x[0], x[:1], 1e-6), ValueError, "out: got shape [1, 6], wanted [4, 6]"),
        (lambda x: norm.rms_norm(x, x[0], x, 1e-6, x[0]), ValueError, "in_scale: got 6 elements, wanted 1"),
        (lambda x: norm.rms_norm(x, x[0], x, 1e-6, None, x[0]), ValueError, "out_scale: got 6"),
        (lambda x: norm.rms_norm_add_residual(x, x[:1], x[0], 1e-6), ValueError, "residual: got shape [1, 6]"),
        (lambda x: sm_constraint_gemm.gemm(x, x), ValueError, "b: got shape [4, 6], wanted [6, any]"),
        (lambda x: sm_constraint_gemm.gemm(x, x.t().half()), TypeError, "b: got torch.float16, wanted torch.float32"),
        (lambda x: sm_constraint_gemm.gemm(x, x.t(), x), ValueError, "c: got shape [4, 6], wanted [4, 4]"),
        (lambda x: sm_constraint_gemm.gemm(x, x.t(), beta=1.0), ValueError, "beta: got 1.0 without c, wanted 0"),
        (lambda x: sm_constraint_gemm.gemm_persistent(x, x.t(), num_sms=0), ValueError, "num_sms: got 0, wanted a positive number"),
        (lambda x: sm_constraint_gemm.gemm_descriptor_persistent(x, x[0]), ValueError, "b: got 1 dimensions, wanted 2"),
    ],
)  # fmt: skip
def test_mistakes(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call(torch.randn(4, 6))
