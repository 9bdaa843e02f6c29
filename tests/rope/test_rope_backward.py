"""Gradients of the rope family: the inverse rotation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import flashinfer

from ..support.oracle import assert_close, filled
from .test_rope import quarter_frequencies, rope_oracle, rotate_oracle

INTERLEAVE = pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])


def gradients(function: Callable[..., object], q, k, grads, in_place: bool = False) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k)]
    tensors = [leaf * 1 for leaf in leaves]
    result = function(*tensors)
    return list(torch.autograd.grad(tensors if in_place else result, leaves, grads))


@pytest.mark.parametrize(
    "shape", [(7, 8, 2, 128, None), (5, 4, 4, 64, 32), (67, 3, 1, 80, 20), (0, 4, 2, 64, None)], ids=str
)
@INTERLEAVE
def test_positions(shape, interleave, dtype, device):
    nnz, q_heads, k_heads, head_dim, rotary_dim = shape
    q, grad_q = (filled((nnz, q_heads, head_dim), dtype, device, False) for _ in range(2))
    k, grad_k = (filled((nnz, k_heads, head_dim), dtype, device, False) for _ in range(2))
    pos_ids = torch.randint(-100, 5000, (nnz,), dtype=torch.int32)
    dim = head_dim if rotary_dim is None else rotary_dim
    frequencies = quarter_frequencies(dim, 1.7, 3e4)
    want = [rope_oracle(grad, -pos_ids, frequencies, interleave) for grad in (grad_q, grad_k)]
    options = dict(rotary_dim=rotary_dim, interleave=interleave, rope_scale=1.7, rope_theta=3e4)
    where = pos_ids.to(device)
    angles = pos_ids.double()[:, None] * frequencies
    cache = torch.cat([angles.cos(), angles.sin()], -1).float().to(device)
    rows = torch.arange(nnz, device=device)
    half = dim // 2
    from_cache = [rotate_oracle(grad, cache[:, :half], -cache[:, half:], interleave) for grad in (grad_q, grad_k)]

    def by_cache(function):
        return lambda q, k: function(rows, q, k, head_dim, cache, not interleave)

    for new, in_place, expected in (
        (
            lambda q, k: flashinfer.apply_rope_pos_ids(q, k, where, **options),
            lambda q, k: flashinfer.apply_rope_pos_ids_inplace(q, k, where, **options),
            want,
        ),
        (
            by_cache(flashinfer.apply_rope_with_cos_sin_cache),
            by_cache(flashinfer.apply_rope_with_cos_sin_cache_inplace),
            from_cache,
        ),
    ):
        got = gradients(new, q, k, (grad_q, grad_k))
        for one, (value, terms) in zip(got, expected, strict=True):
            assert_close(one, value, terms)
        same = gradients(in_place, q, k, (grad_q, grad_k), in_place=True)
        assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))


@INTERLEAVE
def test_requests_and_llama31(interleave, dtype, device):
    lengths = [0, 3, 17, 1]
    nnz = sum(lengths)
    q, grad_q = (filled((nnz, 4, 64), dtype, device, False) for _ in range(2))
    k, grad_k = (filled((nnz, 2, 64), dtype, device, False) for _ in range(2))
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    offsets = torch.randint(0, 1000, (len(lengths),), dtype=torch.int32)
    positions = torch.tensor([int(offsets[r]) + j for r, n in enumerate(lengths) for j in range(n)])
    frequencies = quarter_frequencies(64, 8.0, 5e5, (1, 4, 8192))
    want = [rope_oracle(grad, -positions, frequencies, interleave) for grad in (grad_q, grad_k)]
    places = indptr.to(device), offsets.to(device)
    got = gradients(
        lambda q, k: flashinfer.apply_llama31_rope(q, k, *places, interleave=interleave), q, k, (grad_q, grad_k)
    )
    same = gradients(
        lambda q, k: flashinfer.apply_llama31_rope_inplace(q, k, *places, interleave=interleave),
        q, k, (grad_q, grad_k), in_place=True,
    )  # fmt: skip
    for one, other, (value, terms) in zip(got, same, want, strict=True):
        assert_close(one, value, terms)
        assert torch.equal(one, other)


@INTERLEAVE
def test_gradcheck(interleave):
    """Compare with finite differences in float64, also for the second derivative."""
    q, k = (torch.randn(4, heads, 10, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    pos_ids, indptr = torch.randint(0, 50, (4,)), torch.tensor([0, 3, 4])
    cache = torch.randn(50, random.choice([2, 6, 10]))
    for function in (
        lambda q, k: flashinfer.apply_rope_pos_ids(q, k, pos_ids, rotary_dim=6, interleave=interleave),
        lambda q, k: flashinfer.apply_llama31_rope(q, k, indptr, indptr[1:], interleave=interleave),
        lambda q, k: flashinfer.apply_rope_with_cos_sin_cache(pos_ids, q, k, 10, cache, not interleave),
    ):
        assert torch.autograd.gradcheck(function, (q, k))
        assert torch.autograd.gradgradcheck(function, (q, k))


@INTERLEAVE
def test_float64_on_the_cpu(interleave):
    q, k = torch.randn(6, 3, 32, dtype=torch.float64), torch.randn(6, 1, 32, dtype=torch.float64)
    pos_ids = torch.randint(0, 100000, (6,))
    got = flashinfer.apply_rope_pos_ids(q, k, pos_ids, interleave=interleave)
    for one, x in zip(got, (q, k), strict=True):
        want, _ = rope_oracle(x, pos_ids, quarter_frequencies(32, 1.0, 1e4), interleave)
        torch.testing.assert_close(one, want, rtol=0, atol=1e-9)


def test_in_place_shapes_and_leaves(device):
    q, k = torch.randn(4, 2, 8, device=device, requires_grad=True), torch.randn(4, 1, 8, device=device)
    where = torch.arange(4, device=device)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        flashinfer.apply_rope_pos_ids_inplace(q, k, where)
    with pytest.raises(ValueError, match="rotary_dim: got 7, wanted an even number"):
        flashinfer.apply_rope_pos_ids(q, k, where, rotary_dim=7)
