"""Gradients of the causal convolution against autograd in float64, and against differences of the kernels themselves."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.oracle import check_bits_for_any_threads
from .oracle import convolve
from .test_causal_conv1d import LAYOUTS, laid_out

# Root mean square errors relative to the gradient's own; of half types what rounding may do to every element.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check(given, activation, lengths=None, of=(0, 1)) -> None:
    """Gradients of out (0) and of the final states (1) with respect to all that is given."""
    leaves = {name: one.detach().requires_grad_() for name, one in given.items()}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in given.items()}
    device = leaves["x"].device
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=device).cumsum(0)
    results = flashinfer.causal_conv1d_fn(
        leaves["x"], leaves["weight"], leaves.get("bias"), leaves.get("initial_states"), True, activation=activation,
        cu_seqlens=offsets,
    )  # fmt: skip
    wanted = convolve(
        exact["x"], exact["weight"], exact.get("bias"), exact.get("initial_states"), activation is not None, lengths
    )
    grads = [torch.randn(results[one].shape).to(results[one]) for one in of]
    got = torch.autograd.grad([results[one] for one in of], list(leaves.values()), grads, allow_unused=True)
    right = torch.autograd.grad(
        [wanted[one] for one in of], list(exact.values()), [one.cpu().double() for one in grads], allow_unused=True
    )
    for name, one, other in zip(leaves, got, right, strict=True):
        other = torch.zeros_like(exact[name]) if other is None else other
        assert one.dtype == leaves[name].dtype and one.shape == other.shape
        size = other.square().mean().sqrt()
        assert of == (1,) or not other.numel() or size > 1e-3, name
        error = (one.cpu().double() - other).square().mean().sqrt()
        bound = BOUNDS[one.dtype] if leaves["x"].dtype == one.dtype else 1e-6
        assert not other.numel() or error <= bound * size, f"{name}: {error / size}"


def drawn(x: torch.Tensor, width: int, count: int, affine: torch.dtype) -> dict[str, torch.Tensor]:
    channels, device = x.shape[1], x.device
    given = dict(weight=torch.randn(channels, width), bias=torch.randn(channels))
    given = {"x": x} | {name: one.to(device, affine) for name, one in given.items()}
    return given | {"initial_states": torch.randn(count, channels, width - 1).to(x)}


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_batches(width, layout, activation, dtype, device):
    for channels, tokens in ((24, 2), (37, 9), (520, 300)):
        x = laid_out(layout, random.randint(1, 3), channels, tokens, dtype, device)
        check(drawn(x, width, x.shape[0], dtype), activation)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["out", "states", "both"])
def test_packed_sequences(width, of, device):
    lengths = [0, 5, 1, 2, 0, 63, 3, 0, 150, 1]
    x = laid_out("padded", 1, 72, sum(lengths), torch.float32, device)
    check(drawn(x, width, len(lengths), torch.float32), "silu", lengths, of)
    x = laid_out("channels last", 1, 72, sum(lengths), torch.bfloat16, device)
    check(drawn(x, width, len(lengths), torch.float32), None, lengths, of)


def test_gradient_of_each_argument_only(device):
    """One that requires a gradient is enough, and no other gets one."""
    given = drawn(torch.randn(2, 24, 9, device=device), 4, 2, torch.float32)
    for name in given:
        leaves = {key: one.detach().requires_grad_(key == name) for key, one in given.items()}
        out = flashinfer.causal_conv1d_fn(**leaves, activation="silu")
        (grad,) = torch.autograd.grad(out.square().sum(), leaves[name])
        assert bool(grad.any())


def test_no_tokens(device):
    x = torch.randn(2, 24, 0, device=device, requires_grad=True)
    weight = torch.randn(24, 4, device=device, requires_grad=True)
    states = torch.randn(2, 24, 3, device=device, requires_grad=True)
    out, end = flashinfer.causal_conv1d_fn(x, weight, None, states, True)
    grad = torch.randn_like(end)
    got = torch.autograd.grad([out, end], [x, weight, states], [torch.zeros_like(out), grad])
    assert got[0].shape == x.shape and not bool(got[1].any()) and torch.equal(got[2], grad)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("lengths", [None, [0, 1, 4, 2]], ids=["batch", "packed"])
def test_gradcheck(activation, lengths):
    """Finite differences in float64, of the kernels' own code."""
    width, tokens = random.choice([2, 3, 4]), 7 if lengths else 6
    count = len(lengths) if lengths else 2
    shapes = ((1 if lengths else 2, 5, tokens), (5, width), (5,), (count, 5, width - 1))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    offsets = torch.tensor([0, *lengths]).cumsum(0) if lengths else None

    def function(x, weight, bias, states):
        return flashinfer.causal_conv1d_fn(x, weight, bias, states, True, activation=activation, cu_seqlens=offsets)

    assert torch.autograd.gradcheck(function, leaves, atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradcheck(lambda x, weight: flashinfer.causal_conv1d_fn(x, weight), leaves[:2], atol=1e-8)


def test_sums_over_tokens_are_the_same_in_every_run(dtype, device):
    given = drawn(laid_out("channels last", 3, 72, 700, dtype, device), 4, 3, dtype)
    leaves = {name: one.detach().requires_grad_() for name, one in given.items()}
    grad = torch.randn(3, 72, 700).to(leaves["x"])

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flashinfer.causal_conv1d_fn(**leaves, activation="silu")
        return torch.autograd.grad(out, list(leaves.values()), grad)

    check_bits_for_any_threads(gradients)


def test_second_derivatives_say_that_there_are_none(device):
    x = torch.randn(1, 24, 5, device=device, requires_grad=True)
    out = flashinfer.causal_conv1d_fn(x, torch.randn(24, 4, device=device), activation="silu")
    (once,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="causal_conv1d_backward: has no gradient: second derivatives"):
        torch.autograd.grad(once.sum(), x)


def test_bad_input(device):
    x, weight = torch.ones(2, 5, 8, device=device), torch.ones(8, 4, device=device)
    backward = torch.ops.flashinfer.causal_conv1d_backward
    flashinfer.causal_conv1d_fn(x.transpose(1, 2).requires_grad_(), weight).sum().backward()
    for grads, message in (
        ((x[:1], None), r"grad_out: got shape \[1, 5, 8\], wanted \[2, 5, 8\]"),
        ((x.half(), None), "grad_out: got float16, wanted float32"),
        ((x.transpose(1, 2).contiguous().transpose(1, 2), None), "grad_out: is not contiguous"),
        ((x, weight), r"grad_final: got shape \[8, 4\], wanted \[2, 8, 3\]"),
    ):
        with pytest.raises(RuntimeError, match=f"causal_conv1d_backward: {message}"):
            backward(*grads, x.detach(), weight, None, None, None, False)
