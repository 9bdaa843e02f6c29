"""The delta rule over chunks of tokens: lengths near a chunk's, heads of every size, similar keys, decays of 0."""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer import delta_rule

from .oracle import chunk_bound, error, inputs
from .oracle import delta_rule as oracle

STATE_BOUND = 1e-5
# The error of float32, plus the rounding of every output element to its dtype: half a unit in the last place.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def run(given, lengths=None, **options):
    device = given["q"].device
    offsets = {} if lengths is None else {"cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0)}
    return delta_rule.chunk_gated_delta_rule(**given, scale=0.3, output_final_state=True, **offsets, **options)


def check(given, lengths=None, gradients=True, **options) -> None:
    """Compare results and all gradients with float64.

    If a head has one column, a compared part has one number per head. These may be small relative to the terms of
    their sums, so the bounds are larger by ``slack``.
    """
    dtype = given["q"].dtype
    leaves = {name: one.detach().clone().requires_grad_(gradients) for name, one in given.items()}
    exact = {name: one.detach().cpu().double().requires_grad_(gradients) for name, one in given.items()}
    l2norm = options.get("use_qk_l2norm_in_kernel", False)
    got, want = run(leaves, lengths, **options), oracle(**exact, scale=0.3, l2norm=l2norm, lengths=lengths)
    slack = 4 if given["v"].shape[3] == 1 else 1
    bounds = {one: bound + (slack - 1) * BOUNDS[torch.float32] for one, bound in BOUNDS.items()}
    rounded = chunk_bound(given)
    if rounded is None:
        assert error(got[0], want[0]) < bounds[dtype] and error(got[1], want[1]) < slack * STATE_BOUND
    else:
        assert error(got[0].transpose(1, 2), want[0].transpose(1, 2)) < rounded and error(got[1], want[1]) < rounded
    if not gradients:
        return
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, list(leaves.values()), grads)
    right = torch.autograd.grad(want, list(exact.values()), [one.cpu().double() for one in grads])
    for name, one, other in zip(leaves, ours, right, strict=True):
        if rounded is not None:  # a head at a time
            if name != "initial_state":
                one, other = one.transpose(1, 2), other.transpose(1, 2)
            assert error(one, other) < (2 if l2norm or name == "g" else 1) * rounded, name
            continue
        bound = bounds[dtype] if one.dtype == dtype else slack * STATE_BOUND
        if one.dim() == 3:  # one number per token: compare over all tokens of a head
            one, other = one.mT, other.mT
        assert error(one, other) < (4 if l2norm else 1) * bound, name  # dy - y <y, dy> cancels digits


@pytest.mark.parametrize("tokens", [8, 15, 16, 17, 47, 64, 65])
def test_lengths_around_a_chunk(tokens, device):
    check(inputs(torch.float32, device, batch=1, tokens=tokens, heads=1, value_heads=2, key_dim=20, value_dim=40))


@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (128, 128), (256, 96), (17, 1)])
def test_heads_of_every_size(key_dim, value_dim, dtype, device):
    check(inputs(dtype, device, batch=1, tokens=37, heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim))


def test_random_sequences(device):
    lengths = [random.choice([0, 1, 2, 16, random.randrange(3, 60)]) for _ in range(7)] + [40]
    given = inputs(
        torch.float32, device, batch=1, tokens=sum(lengths), sequences=len(lengths), key_dim=40, value_dim=50
    )
    check(given, lengths, use_qk_l2norm_in_kernel=True)


def test_similar_keys(device):
    check(inputs(torch.float32, device, batch=1, tokens=70, heads=1, value_heads=2, alike=True))


def test_eight_thousand_tokens(device):
    given = inputs(
        torch.float32, device, batch=1, tokens=8193, heads=1, value_heads=1, key_dim=8, value_dim=8, alike=True
    )
    check(given, gradients=False)


def test_resets(device):
    """Use decays of 0, with logarithms of minus infinity. They erase all earlier tokens and cause no NaN.

    In a chunk with two of them, sums of logarithms reach -100, where float32 rounds by 4e-6.
    """
    given = inputs(torch.float32, device, tokens=50)
    given["g"][:, [0, 20, 21, 37]] = -float("inf")
    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    o, state = run(leaves)
    exact = {name: one.cpu().double().requires_grad_() for name, one in given.items()}
    finite = exact | {"g": exact["g"].clamp(min=-60.0)}
    want, last = oracle(**finite, scale=0.3)
    assert error(o, want) < 5e-5 and error(state, last) < 5e-5
    wanted = [name for name in given if name not in ("g", "initial_state")]
    grad = torch.randn_like(o)
    got = torch.autograd.grad(o, [leaves[name] for name in given], grad)
    right = torch.autograd.grad(want, [exact[name] for name in wanted], grad.cpu().double())
    assert all(one.isfinite().all() for one in got)
    for name, other in zip(wanted, right, strict=True):
        one = got[list(given).index(name)]
        if one.dim() == 3:
            one, other = one.mT, other.mT
        assert error(one, other) < 5e-5, name


def test_columns_of_few_heads_are_tasks():
    """On the CPU, columns of a head are separate tasks if heads are fewer than threads. Bits do not change."""
    given = inputs(torch.float32, "cpu", batch=1, tokens=40, heads=1, value_heads=1, value_dim=150)
    threads = torch.get_num_threads()
    want = run(given)
    try:
        torch.set_num_threads(5)
        assert all(one.equal(other) for one, other in zip(run(given), want, strict=True))
    finally:
        torch.set_num_threads(threads)
