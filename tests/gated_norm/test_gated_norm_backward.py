"""Gradients of RMSNorm with a gate against autograd in float64."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.oracle import assert_close, check_bits_for_any_threads, filled
from .oracle import gated, gradient_terms, wide
from .test_gated_norm import OPTIONS, grouped

SHAPES = [(1, 1), (3, 6), (7, 128), (2, 3, 64), (5, 1000), (2, 8192), (1, 40000), (333, 257), (0, 64), (9,)]
# Units in the last place of the sum of absolute terms, and of the result.
ULPS = {torch.float32: 8.0, torch.float16: 2.0, torch.bfloat16: 2.0}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_gradients(shape, options, dtype, device):
    padded = random.random() < 0.5
    x, gate = filled(shape, dtype, device, padded, scale=3.0), filled(shape, dtype, device, not padded, scale=2.0)
    weight, grad = filled(shape[-1:], dtype, device, False), filled(shape, dtype, device, False)
    options = options | dict(group_size=grouped(shape))
    exact = [one.requires_grad_() for one in wide(x, gate, weight)]
    want = torch.autograd.grad(gated(*exact, 1e-5, **options), exact, wide(grad)[0])
    terms = gradient_terms(*wide(grad, x, gate, weight), 1e-5, **options)
    leaves = [one.requires_grad_() for one in (x, gate, weight)]  # which keep their strides
    got = torch.autograd.grad(flashinfer.gated_rmsnorm(*leaves, 1e-5, **options), leaves, grad)
    for one, value, size in zip(got, want, terms, strict=True):
        assert_close(one, value, size, ULPS[dtype])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_gradcheck(options):
    """Finite differences in float64, of the kernels' own code."""
    size, group = random.choice([(1, 1), (3, None), (9, 3), (17, None), (24, 8)])
    x, gate = (torch.randn(4, size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(size, dtype=torch.float64, requires_grad=True)

    def function(*tensors):
        return flashinfer.gated_rmsnorm(*tensors, 1e-2, group_size=group, **options)

    assert torch.autograd.gradcheck(function, (x, gate, weight), atol=1e-8, rtol=1e-6)
    got = torch.autograd.grad(function(x, gate, weight).sum(), (x, gate, weight))
    assert size == 1 or all(float(one.detach().abs().max()) > 1e-3 for one in got)


def test_gradient_of_each_argument_only(device):
    given = dict(input=torch.randn(5, 24, device=device), gate=torch.randn(5, 24, device=device),
                 weight=torch.randn(24, device=device))  # fmt: skip
    for name in given:
        leaves = {key: one.detach().requires_grad_(key == name) for key, one in given.items()}
        (grad,) = torch.autograd.grad(flashinfer.gated_rmsnorm(**leaves).square().sum(), leaves[name])
        assert bool(grad.any())


def test_sums_over_rows_are_the_same_in_every_run(dtype, device):
    leaves = [filled(shape, dtype, device, False).requires_grad_() for shape in ((1031, 96), (1031, 96), (96,))]
    grad = filled((1031, 96), dtype, device, False)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flashinfer.gated_rmsnorm(*leaves, group_size=32), leaves, grad)

    check_bits_for_any_threads(gradients)


def test_second_derivatives_say_that_there_are_none(device):
    x = torch.randn(4, 24, device=device, requires_grad=True)
    out = flashinfer.gated_rmsnorm(x, x.detach(), x[0].detach())
    (once,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="gated_rmsnorm_backward: has no gradient: second derivatives"):
        torch.autograd.grad(once.sum(), x)
