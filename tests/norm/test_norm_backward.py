"""Gradients of the norm family against autograd in float64."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.oracle import assert_close, check_bits_for_any_threads, filled

SHAPES = [(1, 1), (3, 5), (7, 128), (2, 3, 64), (5, 1000), (4, 4096), (2, 8192), (1, 40000), (333, 257), (0, 64), (9,)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


def layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float) -> torch.Tensor:
    center = x - x.mean(-1, keepdim=True)
    return center * torch.rsqrt(center.square().mean(-1, keepdim=True) + eps) * gamma + beta


def gradients(function, grads, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of ``function`` with respect to ``tensors``, in their dtypes."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return list(torch.autograd.grad(function(*leaves), leaves, grads))


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().cpu().double() for tensor in tensors]


def rms_norm_terms(grad, x, weight, eps, offset) -> list[torch.Tensor]:
    """Return the magnitudes of the terms in the gradients of x and weight."""
    grad, x, weight = (tensor.abs() for tensor in wide(grad, x, weight))
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    weighted = grad * (weight + offset)
    of_x = weighted * root + x * root**3 * (weighted * x).mean(-1, keepdim=True)
    return [of_x, (grad * x * root).reshape(-1, x.shape[-1]).sum(0)]


def layer_norm_terms(grad, x, gamma, eps) -> list[torch.Tensor]:
    grad, x, gamma = wide(grad, x, gamma)
    grad, gamma, mean = grad.abs(), gamma.abs(), x.mean(-1, keepdim=True)
    root = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    # a mean's own rounding is that of the sum of all |x|
    normed, weighted = (x.abs() + x.abs().mean(-1, keepdim=True)) * root, grad * gamma
    of_x = root * (weighted + weighted.mean(-1, keepdim=True) + normed * (weighted * normed).mean(-1, keepdim=True))
    rows = -1, x.shape[-1]
    return [of_x, (grad * normed).reshape(rows).sum(0), grad.reshape(rows).sum(0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
def test_rmsnorm(shape, padded, gemma, dtype, device):
    function, offset = (flashinfer.gemma_rmsnorm, 1.0) if gemma else (flashinfer.rmsnorm, 0.0)
    x, grad = filled(shape, dtype, device, padded, scale=3.0), filled(shape, dtype, device, not padded)
    weight, eps = filled(shape[-1:], dtype, device, False), 1e-5
    want = gradients(lambda x, w: rms_norm(x, w, eps, offset), wide(grad)[0], *wide(x, weight))
    terms = rms_norm_terms(grad, x, weight, eps, offset)
    leaves = x.requires_grad_(), weight.requires_grad_()  # x keeps its strides
    for got, value, scale in zip(torch.autograd.grad(function(*leaves, eps), leaves, grad), want, terms, strict=True):
        assert_close(got, value, scale)
    for got, value, scale in zip(flashinfer.rmsnorm_backward(grad, x, weight, eps, offset), want, terms, strict=True):
        assert_close(got, value, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("affine_float32", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layernorm(shape, padded, affine_float32, mean, dtype, device):
    affine = torch.float32 if affine_float32 else dtype
    x, grad = filled(shape, dtype, device, padded), filled(shape, dtype, device, not padded)
    x += mean
    gamma, beta = filled(shape[-1:], affine, device, False), filled(shape[-1:], affine, device, False)
    want = gradients(lambda *tensors: layer_norm(*tensors, 1e-6), wide(grad)[0], *wide(x, gamma, beta))
    terms = layer_norm_terms(grad, x, gamma, 1e-6)
    leaves = x.requires_grad_(), gamma.requires_grad_(), beta.requires_grad_()
    for results in (
        torch.autograd.grad(flashinfer.layernorm(*leaves), leaves, grad),
        flashinfer.layernorm_backward(grad, x, gamma),
    ):
        for got, value, scale in zip(results, want, terms, strict=True):
            assert_close(got, value, scale)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 64), (5, 1000), (65, 8), (0, 64)], ids=str)
@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
def test_fused_add_rmsnorm(shape, gemma, dtype, device):
    """Run in place on tensors that are not leaves, and use both results."""
    function = flashinfer.gemma_fused_add_rmsnorm if gemma else flashinfer.fused_add_rmsnorm

    def in_place(x, residual, weight):
        x, residual = x * 1, residual * 1
        function(x, residual, weight, 1e-5)
        return x, residual

    def oracle(x, residual, weight):
        # The sum is normalised before it is rounded. Its gradient comes from the rounded sum.
        total = x + residual
        rounded = total + (total.detach().to(dtype).double() - total.detach())
        return rms_norm(rounded, weight, 1e-5, float(gemma)), total

    x, residual, grad, grad_sum = (filled(shape, dtype, device, False) for _ in range(4))
    weight = filled(shape[-1:], dtype, device, False)
    tensors = x, residual, weight
    got = gradients(in_place, (grad, grad_sum), *tensors)
    want = gradients(oracle, tuple(wide(grad, grad_sum)), *wide(*tensors))
    of_x, of_weight = rms_norm_terms(grad, (x + residual), weight, 1e-5, float(gemma))
    of_x = of_x + grad_sum.cpu().double().abs()
    for result, value, scale in zip(got, want, (of_x, of_x, of_weight), strict=True):
        assert_close(result, value, scale)
    with torch.no_grad():
        same, total = x.clone(), residual.clone()
        function(same, total, weight, 1e-5)
    for result, value in zip(in_place(*(tensor.requires_grad_() for tensor in tensors)), (same, total), strict=True):
        assert torch.equal(result, value)


def test_out_is_followed(device):
    x, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(8, device=device, requires_grad=True)
    out = torch.empty(4, 8, device=device)
    assert flashinfer.rmsnorm(x, weight, out=out) is out and out.requires_grad
    got = torch.autograd.grad(out.square().sum(), (x, weight))
    want = torch.autograd.grad(flashinfer.rmsnorm(x, weight).square().sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=r"rmsnorm: out: got shape \[4, 1\], wanted \[4, 8\]"):
        flashinfer.rmsnorm(x, weight, out=torch.empty(4, 1, device=device))
    with pytest.raises(TypeError, match=r"rmsnorm: out: got torch.float16, wanted torch.float32"):
        flashinfer.rmsnorm(x, weight, out=torch.empty(4, 8, device=device).half())


def test_errors_of_gradients(device):
    x, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        flashinfer.fused_add_rmsnorm(x, x.detach().clone(), weight)
    (once,) = torch.autograd.grad(flashinfer.rmsnorm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="rmsnorm_backward: has no gradient: second derivatives"):
        torch.autograd.grad(once.sum(), x)


def test_sums_over_rows_are_the_same_in_every_run(dtype, device):
    x, grad = filled((1031, 96), dtype, device, False), filled((1031, 96), dtype, device, False)
    weight = filled((96,), dtype, device, False)
    check_bits_for_any_threads(lambda: flashinfer.rmsnorm_backward(grad, x, weight))


@pytest.mark.parametrize("affine", [torch.float32, torch.float64])
def test_float64_on_the_cpu(affine):
    x, weight, beta = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 37), (37,), (37,)))
    torch.testing.assert_close(flashinfer.rmsnorm(x, weight), rms_norm(x, weight, 1e-6, 0.0), rtol=1e-14, atol=1e-14)
    gamma, beta = weight.to(affine), beta.to(affine)
    want = layer_norm(x, gamma.double(), beta.double(), 1e-6)
    torch.testing.assert_close(flashinfer.layernorm(x, gamma, beta), want, rtol=1e-14, atol=1e-14)


def test_gradcheck():
    """Compare with finite differences of the kernels in float64."""

    def fused(function):
        def in_place(x, residual, weight):
            x, residual = x * 1, residual * 1
            function(x, residual, weight, 1e-3)
            return x, residual

        return in_place

    size = random.choice([1, 3, 9, 17])
    x, residual = (torch.randn(4, size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, beta = (torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: flashinfer.rmsnorm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: flashinfer.gemma_rmsnorm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda *tensors: flashinfer.layernorm(*tensors, 1e-3), (x, weight, beta))
    assert torch.autograd.gradcheck(fused(flashinfer.fused_add_rmsnorm), (x, residual, weight))
    assert torch.autograd.gradcheck(fused(flashinfer.gemma_fused_add_rmsnorm), (x, residual, weight))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(grad=torch.ones(4, 7)), ValueError, r"grad: got shape \[4, 7\], wanted \[4, 8\] as input has"),
        (dict(grad=torch.ones(4, 8).half()), TypeError, "grad: got float16, wanted float32"),
        (dict(grad=torch.ones(8, 4).t()), ValueError, "grad: got stride 4 of the last dimension"),
        (dict(weight=torch.ones(7)), ValueError, r"weight: got shape \[7\], wanted \[8\]"),
        (dict(weight=torch.ones(8).half()), TypeError, "weight: got float16, wanted float32"),
        (dict(input=torch.ones(4, 8, dtype=torch.int32)), TypeError, "input: got int32, wanted float32"),
    ],
)
def test_bad_input(change, error, message, device):
    arguments = dict(grad=torch.ones(4, 8), input=torch.ones(4, 8), weight=torch.ones(8)) | change
    arguments = {name: value.to(device) for name, value in arguments.items()}
    with pytest.raises(error, match=f"rmsnorm_backward: {message}"):
        flashinfer.rmsnorm_backward(**arguments)
    arguments["gemma"] = arguments.pop("weight")
    if "weight: got float16" not in message:
        with pytest.raises(error, match=f"layernorm_backward: {message.replace('weight', 'gemma')}"):
            flashinfer.layernorm_backward(**arguments)
