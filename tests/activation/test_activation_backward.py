"""Gradients of the activation family against float64."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.oracle import assert_close, filled
from .test_activation import FUNCTIONS, SHAPES, act_and_mul_oracle

BACKWARD = {name: getattr(flashinfer, f"{name}_and_mul_backward") for name in FUNCTIONS}


def slope(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the derivative in float64, and the sum of the magnitudes of its terms."""
    if name == "gelu":
        below = torch.special.erfc(-x / math.sqrt(2)) / 2
        rise = x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
        # far below zero the difference cancels: erfc's own error counts
        return below + rise, below.abs() + rise.abs()
    scale = 2 * math.sqrt(2 / math.pi)
    v = x if name == "silu" else scale * (x + 0.044715 * x**3)
    dv = torch.ones_like(x) if name == "silu" else scale * (1 + 3 * 0.044715 * x.square())
    first, second = torch.sigmoid(v), x * dv * torch.sigmoid(v) * torch.sigmoid(-v)
    return first + second, first.abs() + second.abs()


def backward_oracle(name: str, grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.cpu().double()
    gate, up = x.cpu().double().chunk(2, -1)
    value, terms = slope(name, gate)
    of_up = act_and_mul_oracle(name, torch.cat([gate, grad], -1))
    return torch.cat([grad * up * value, of_up], -1), torch.cat([(grad * up).abs() * terms, of_up.abs()], -1)


@pytest.fixture(params=list(FUNCTIONS))
def name(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_act_and_mul(shape, padded, name, dtype, device):
    x = filled(shape, dtype, device, padded, scale=4.0)
    grad = filled((*shape[:-1], shape[-1] // 2), dtype, device, not padded)
    want, terms = backward_oracle(name, grad, x)
    assert_close(BACKWARD[name](grad, x), want, terms)
    x.requires_grad_()
    (got,) = torch.autograd.grad(FUNCTIONS[name](x), x, grad)
    assert_close(got, want, terms)


def test_every_argument_keeps_its_digits(name, dtype, device):
    gate = torch.cat([torch.linspace(-80, 20, 20001), torch.linspace(-16, 6, 20001), torch.randn(1000) * 1e-3])
    x = torch.stack([gate, torch.ones_like(gate)]).t().contiguous().to(dtype)
    grad = torch.ones(len(gate), 1, dtype=dtype)
    want, terms = backward_oracle(name, grad, x)
    assert_close(BACKWARD[name](grad.to(device), x.to(device)), want, terms)


def test_limits(name, dtype, device):
    inf = float("inf")
    x = torch.tensor([[inf, 2.0], [-inf, 2.0], [float("nan"), 2.0]], dtype=dtype, device=device)
    got = BACKWARD[name](torch.ones(3, 1, dtype=dtype, device=device), x).cpu()
    assert got[0].tolist() == [2.0, inf] and got[1].tolist() == [0.0, 0.0] and bool(got[2].isnan().all())


def test_out_is_followed(name, device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    out = torch.empty(4, 8, device=device)
    assert FUNCTIONS[name](x, out=out) is out
    (got,) = torch.autograd.grad(out.square().sum(), x)
    (want,) = torch.autograd.grad(FUNCTIONS[name](x).square().sum(), x)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match=rf"{name}_and_mul: out: got shape \[4, 1\], wanted \[4, 8\]"):
        FUNCTIONS[name](x, out=torch.empty(4, 1, device=device))


def test_second_derivatives_say_that_there_are_none(name, device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    (once,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x, create_graph=True)
    with pytest.raises(GradientError, match=f"{name}_and_mul_backward: has no gradient: second derivatives"):
        torch.autograd.grad(once.sum(), x)


def test_gradcheck(name):
    """Compare with finite differences of the kernels in float64."""
    x = (2 * torch.randn(5, 2 * 19, dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(FUNCTIONS[name](x), act_and_mul_oracle(name, x), rtol=1e-7, atol=1e-7)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x,))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(grad=torch.ones(4, 7)), ValueError, r"grad: got shape \[4, 7\], wanted \[4, 8\]"),
        (dict(grad=torch.ones(4, 8).half()), TypeError, "grad: got float16, wanted float32"),
        (dict(grad=torch.ones(8, 4).t()), ValueError, "grad: got stride 4 of the last dimension"),
        (dict(input=torch.ones(4, 15)), ValueError, "input: got a last dimension of 15, wanted an even one"),
        (dict(input=torch.ones(4, 16, dtype=torch.int32)), TypeError, "input: got int32, wanted float32"),
        (dict(input=torch.ones(16, 4).t()), ValueError, "input: got stride 4 of the last dimension"),
    ],
)
def test_bad_input(change, error, message, name, device):
    arguments = dict(grad=torch.ones(4, 8), input=torch.ones(4, 16)) | change
    with pytest.raises(error, match=f"{name}_and_mul_backward: {message}"):
        BACKWARD[name](**{key: value.to(device) for key, value in arguments.items()})


def test_module_names_and_unknown_function(name):
    spec = flashinfer.gen_act_and_mul_backward_module(name, "cpu")
    assert spec.name == f"activation_backward_{name}_cpu"
    with pytest.raises(ValueError, match="act_func_name: got 'relu', wanted one of silu, gelu, gelu_tanh"):
        flashinfer.gen_act_and_mul_backward_module("relu")
