"""RMSNorm with 8-bit results, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.errors import GradientError
from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
EPS = 1e-5


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the unrounded result in float64."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double() / scale


def information(dtype: torch.dtype) -> torch.finfo | torch.iinfo:
    return torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)


def assert_rounded(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check rounding to nearest: within half a step of the format, at least that of its subnormal numbers."""
    info = information(got.dtype)
    want = want.clamp(info.min, info.max)
    if got.dtype == torch.int8:
        error = (got.double() - want).abs()
        assert bool((error <= 0.5001).all()), f"off by {error.max()}"
        return
    step = torch.maximum(torch.exp2(want.abs().log2().floor()) * info.eps, torch.tensor(info.tiny * info.eps))
    error = (got.double() - want).abs()
    assert bool((error <= step.to(error.device) * 0.501).all()), f"off by {error.max()}"


@pytest.mark.parametrize("quantized", EIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 128), (3, 101), (2, 3, 4096), (1, 20000), (0, 64), (7, 1)])
def test_values(shape, dtype, quantized, device):
    x, residual = drawn(shape, dtype, device), drawn(shape, dtype, device)
    weight, scale = drawn(shape[-1:], dtype, device), 0.03
    out = torch.full(shape, 3.0, device=device).to(quantized)
    assert rmsnorm_quant(out, x, weight, scale, EPS) is out
    assert_rounded(out, normed(x.double(), weight, scale))
    total, before = x.double() + residual.double(), x.clone()
    by_tensor = torch.full(shape, 3.0, device=device).to(quantized)
    fused_add_rmsnorm_quant(by_tensor, x, residual, weight, torch.tensor([scale], device=device), EPS)
    assert_rounded(by_tensor, normed(total, weight, scale))
    assert torch.equal(residual, total.to(dtype)) and torch.equal(x, before)


@pytest.mark.parametrize("quantized", EIGHT)
def test_large_values_are_clamped_and_nan_stays(quantized, device):
    x = torch.ones(2, 64, device=device)
    x[0, ::2], x[1, 3] = -1, float("nan")
    out = torch.zeros(2, 64, device=device).to(quantized)
    rmsnorm_quant(out, x, torch.ones(64, device=device), 1e-9)
    info = information(quantized)
    assert torch.equal(out[0].float(), torch.where(x[0] > 0, info.max, info.min).float())
    assert bool((out[1] == 0).all() if quantized == torch.int8 else out[1].float().isnan().all())


def test_strides(device):
    whole = drawn((6, 3, 80), torch.float16, device)
    x, residual = whole[:, 1, :64], whole.clone()[:, 2, :64]
    out = torch.full((6, 100), 5.0, device=device).to(torch.float8_e4m3fn)
    weight, total = drawn((64,), torch.float16, device), x.double() + residual.double()
    fused_add_rmsnorm_quant(out[:, 20:84], x, residual, weight, 0.1, EPS)
    assert_rounded(out[:, 20:84], normed(total, weight, 0.1))
    assert bool((out[:, :20].float() == 5).all()) and bool((out[:, 84:].float() == 5).all())


def test_scales_of_a_device_are_read_where_the_kernel_runs(device):
    x, weight = drawn((4, 64), torch.float32, device), drawn((64,), torch.float32, device)
    for dtype in (torch.float32, torch.float64):
        scale = torch.tensor(0.25, dtype=dtype, device=device)
        out = torch.zeros(4, 64, device=device).to(torch.float8_e5m2)
        rmsnorm_quant(out, x, weight, scale, EPS)
        assert_rounded(out, normed(x.double(), weight, 0.25))


def test_mistakes(device):
    x, weight = torch.ones(4, 64, device=device), torch.ones(64, device=device)
    out = torch.zeros(4, 64, device=device).to(torch.float8_e4m3fn)
    for error, message, args in (
        (TypeError, "out: got float32, wanted float8_e4m3fn or float8_e5m2 or int8", (x.clone(), x, weight, 1.0)),
        (ValueError, r"out: got shape \[2, 64\], wanted \[4, 64\]", (out[:2], x, weight, 1.0)),
        (ValueError, r"weight: got shape \[32\], wanted \[64\]", (out, x, weight[:32], 1.0)),
        (ValueError, "scale: got no positive number", (out, x, weight, 0.0)),
        (ValueError, "scale: got 2 elements, wanted 1", (out, x, weight, torch.ones(2, device=device))),
        (TypeError, "scale: got float16", (out, x, weight, torch.ones(1, device=device).half())),
        (TypeError, "weight: got float16, wanted float32", (out, x, weight.half(), 1.0)),
        (GradientError, "has no gradient", (out, x.clone().requires_grad_(), weight, 1.0)),
    ):
        with pytest.raises(error, match=message):
            rmsnorm_quant(*args)
    with pytest.raises(TypeError, match="residual: got float16"):
        fused_add_rmsnorm_quant(out, x, x.half(), weight, 1.0)
    with pytest.raises(ValueError, match="overlap"):
        fused_add_rmsnorm_quant(out, x, x, weight, 1.0)
    with pytest.raises(TypeError, match="scale"):
        rmsnorm_quant(out, x, weight, None)
    assert not bool(out.float().any())
