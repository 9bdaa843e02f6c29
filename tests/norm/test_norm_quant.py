"""Norms with 8-bit results, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.errors import GradientError
from flashinfer.norm import (
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_quant,
    layernorm_quant,
    rmsnorm_quant,
)

from ..support.oracle import rounding

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


def assert_rounded(got: torch.Tensor, want: torch.Tensor, before: torch.Tensor | float = 0.0) -> None:
    """Check rounding to nearest: within half a step of the format, at least that of its subnormal numbers.

    ``before`` is the largest error of the rounded number.
    """
    info = information(got.dtype)
    want = want.clamp(info.min, info.max)
    if got.dtype == torch.int8:
        error = (got.double() - want).abs()
        assert bool((error <= 0.5001 + before).all()), f"off by {error.max()}"
        return
    step = torch.maximum(torch.exp2(want.abs().log2().floor()) * info.eps, torch.tensor(info.tiny * info.eps))
    error = (got.double() - want).abs()
    assert bool((error <= step.to(error.device) * 0.501 + before).all()), f"off by {error.max()}"


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


@pytest.mark.parametrize("quantized", EIGHT)
@pytest.mark.parametrize("affine", [torch.float32, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 128), (3, 101), (2, 3, 4096), (1, 40000), (0, 64), (7, 1)])
def test_layernorm(shape, dtype, affine, quantized, device):
    x = drawn(shape, dtype, device) + 1
    gamma, beta = (drawn(shape[-1:], affine or dtype, device) for _ in "12")
    centred = x.double() - x.double().mean(-1, keepdim=True)
    want = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPS) * gamma.double() + beta.double()
    for scale in (0.03, torch.tensor([0.03], device=device)):
        out = torch.full(shape, 3.0, device=device).to(quantized)
        assert layernorm_quant(out, x, gamma, beta, scale, EPS) is None
        terms = (want - beta.double()).abs() + beta.double().abs()
        assert_rounded(out, want / 0.03, (rounding(want, dtype) + terms * 1e-5) / 0.03)


def test_layernorm_mistakes(device):
    x, w = torch.ones(4, 64, device=device, dtype=torch.bfloat16), torch.ones(64, device=device)
    out = torch.zeros(4, 64, device=device).to(torch.float8_e4m3fn)
    for error, message, args in (
        (TypeError, "gemma: got float16, wanted float32 or bfloat16", (out, x, w.half(), w.half(), 1.0)),
        (TypeError, "beta: got bfloat16, wanted float32", (out, x, w, w.bfloat16(), 1.0)),
        (TypeError, "out: got bfloat16", (out.bfloat16(), x, w, w, 1.0)),
        (ValueError, r"beta: got shape \[63\]", (out, x, w, w[:63], 1.0)),
        (ValueError, r"out: got shape \[3, 64\]", (out[:3], x, w, w, 1.0)),
        (ValueError, "scale: got 2 elements, wanted 1", (out, x, w, w, torch.ones(2, device=device))),
        (ValueError, "scale: got no positive number", (out, x, w, w, -1.0)),
        (GradientError, "has no gradient", (out, x.clone().requires_grad_(), w, w, 1.0)),
    ):
        with pytest.raises(error, match=f"^layernorm_quant: .*{message}"):
            layernorm_quant(*args)
    assert not bool(out.float().any())


class Blocks:
    """Arguments of the norm with a scale for each block. Rows of outputs have margins of NaN."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: str, pad: int = 16) -> None:
        wide = [drawn((rows, size + pad), dtype, device)[:, :size] for _ in "12"]
        (self.x, self.residual), self.weight = wide, drawn((size,), dtype, device)
        self.outs = torch.full((rows, size + pad), float("nan"), device=device)
        self.out = self.outs.to(torch.float8_e4m3fn)[:, :size]
        self.normed = self.outs.to(dtype)[:, :size]
        self.scale = torch.full((size // 128, -(-rows // 4) * 4), float("nan"), device=device)

    def call(self, normed: torch.Tensor | None = None) -> None:
        normed = self.normed if normed is None else normed
        fused_add_rmsnorm_fp8_block_quant(self.out, self.scale, normed, self.x, self.residual, self.weight, EPS)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("pad", [16, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(5, 128), (9, 384), (2, 4096), (3, 7168), (1, 40960), (0, 256), (2, 0)])
def test_blocks(rows, size, dtype, pad, in_place, device):
    a = Blocks(rows, size, dtype, device, pad)
    if size:
        a.x[:, 64:128] = a.residual[:, 64:128] = 0  # half of a block
    if rows > 1 and size > 128:
        a.x[1, 128:256] = a.residual[1, 128:256] = 0  # all of one
    total, before = a.x.double() + a.residual.double(), a.x.clone()
    a.call(a.x if in_place else None)
    normed = a.x if in_place else a.normed
    want = total / torch.sqrt((total * total).mean(-1, keepdim=True) + EPS) * a.weight.double()
    assert bool(((normed.double() - want).abs() <= rounding(want, dtype) + want.abs() * 1e-5).all())
    assert torch.equal(a.residual, total.to(dtype)) and (in_place or torch.equal(a.x, before))
    blocks = normed.float().reshape(rows, size // 128, 128)
    # Divided in float64: on a GPU, torch multiplies by a reciprocal in the place of a division by a number.
    scale = (blocks.abs().amax(-1).clamp(min=1e-10).double() / 448).float() if size else blocks[..., 0]
    assert torch.equal(a.scale[:, :rows], scale.T) and bool(a.scale[:, rows:].isnan().all())
    exact = (blocks.double() / scale.double()[..., None]).reshape(rows, size)
    assert_rounded(a.out, exact, exact.abs() * 1e-6)


def test_block_mistakes(device):
    def but(**change: torch.Tensor) -> None:
        arguments = dict(
            out=a.out, block_scale=a.scale, normed_out=a.normed, input=a.x, residual=a.residual, weight=a.weight
        )
        fused_add_rmsnorm_fp8_block_quant(**{**arguments, **change})

    a = Blocks(4, 256, torch.float16, device)
    for error, message, change in (
        (TypeError, "out: got float8_e5m2, wanted float8_e4m3fn", dict(out=a.out.float().to(torch.float8_e5m2))),
        (TypeError, "block_scale: got float16", dict(block_scale=a.scale.half())),
        (TypeError, "normed_out: got float32", dict(normed_out=a.normed.float())),
        (ValueError, "input: got a last dimension of 255, wanted a multiple of 128", dict(input=a.x[:, :255])),
        (ValueError, r"block_scale: got shape \[1, 4\]", dict(block_scale=a.scale[:1])),
        (ValueError, "block_scale: got 3 columns, wanted at least the 4 rows", dict(block_scale=a.scale[:, :3])),
        (ValueError, r"residual: got shape \[3, 256\]", dict(residual=a.residual[:3])),
        (ValueError, r"weight: got shape \[128\]", dict(weight=a.weight[:128])),
        (ValueError, "overlaps", dict(residual=a.x)),
        (ValueError, "overlaps", dict(normed_out=a.residual)),
        (GradientError, "has no gradient", dict(input=a.x.clone().requires_grad_())),
    ):
        with pytest.raises(error, match=f"^fused_add_rmsnorm_fp8_block_quant: .*{message}"):
            but(**change)
    assert bool(a.out.float().isnan().all()) and bool(a.scale.isnan().all()) and bool(a.normed.isnan().all())
