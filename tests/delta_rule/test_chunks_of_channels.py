"""Kimi Delta Attention over chunks in half types, with channels that decay to nearly 0.

test_chunks_of_half_types.py has its other tests.
"""

from __future__ import annotations

import pytest
import torch

from flashinfer._delta_rule.operators import delta_rule as operator

from .oracle import delta_rule as oracle
from .oracle import error, inputs
from .test_chunks_of_half_types import (
    HALVES,
    NAMES_OF_SIZES,
    SIZES,
    bound_of,
    check,
    check_gradients,
    exactly,
    inputs_of,
    run,
)  # fmt: skip


def forgetful(dtype: torch.dtype, device: str, **shape: int) -> dict[str, torch.Tensor]:
    """Return inputs with strong decay: of some channels at every token, of others at a few tokens."""
    given = inputs_of("channel", dtype, device, **shape)
    rare = torch.rand_like(given["g"]) < 0.1
    given["g"] = torch.where(rare, -25 * torch.rand_like(given["g"]), given["g"])
    given["g"][..., ::3] *= 40
    return given


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("sizes", [one for one in SIZES if one[2] <= 128], ids=str)
def test_heads_of_every_size(sizes, device):
    for dtype in HALVES:
        check(forgetful(dtype, device, **dict(zip(NAMES_OF_SIZES, sizes, strict=True))))


def test_both_gates(device):
    """Use a gate of all channels and a gate per channel. Their logarithms add."""
    given = inputs(torch.float16, device, row_gate=True)
    names = ("q", "k", "v", "g", "gk", "beta", "initial_state")
    o, state = operator(*(given[name] for name in names), None, 0.3, True, False, False, True)
    want, last = oracle(**{name: one.cpu().double() for name, one in given.items()}, scale=0.3)
    assert error(o.transpose(1, 2), want.transpose(1, 2)) < bound_of(given) and error(state, last) < bound_of(given)


def test_gradients_where_channels_forget(device):
    """Compare gradients with float64 for strong decay. With decays of 0, check that they are finite."""
    given = forgetful(torch.bfloat16, device, batch=1, tokens=150, key_dim=128)
    check_gradients(given)
    given["g"][:, [0, 20, 21, 37, 64, 149], :, ::3] = -float("inf")
    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    got = torch.autograd.grad(run(leaves)[0].sum(), list(leaves.values()))
    assert all(one.isfinite().all() for one in got)


def test_gradients_of_one_result(device):
    """Compute gradients of only the output and of only the state, without an initial state. Two runs are equal."""
    given = inputs_of("channel", torch.bfloat16, device, tokens=140)
    leaves = {name: one.clone().requires_grad_() for name, one in given.items() if name != "initial_state"}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in leaves.items()}
    got = run(leaves)
    want = exactly(exact)
    for which, names in ((0, "qkvg"), (1, "kvg")):
        grad = torch.randn_like(got[which])
        mine = [
            torch.autograd.grad(got[which], [leaves[name] for name in names], grad, retain_graph=True) for _ in range(2)
        ]
        right = torch.autograd.grad(
            want[which], [exact[name] for name in names], grad.cpu().double(), retain_graph=True
        )
        for name, one, again, other in zip(names, *mine, right, strict=True):
            assert one.equal(again), name
            assert error(one.transpose(1, 2), other.transpose(1, 2)) < (2 if name == "g" else 1) * bound_of(given), name
