"""Kimi Delta Attention over chunks in half types, each channel of a key with a gate: against float64, a head at a time.

On the CPU, and where rows cannot be copied by 16 bytes, these calls are computed in float: the bounds hold all the more.
"""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer import delta_rule
from flashinfer._delta_rule.operators import delta_rule as operator

from .oracle import delta_rule as oracle
from .oracle import error, inputs
from .test_chunks_of_half_types import HALVES, bound_of


def kda_inputs(dtype: torch.dtype, device: str, strong: bool = False, **shape) -> dict[str, torch.Tensor]:
    """Channels that forget little; ``strong``: some that forget nearly everything at some tokens, too."""
    given = inputs(dtype, device, gate=False, row_gate=True, **shape)
    given["g"] = given.pop("gk")
    if strong:
        rare = torch.rand_like(given["g"]) < 0.1
        given["g"] = torch.where(rare, -25 * torch.rand_like(given["g"]), given["g"])
        given["g"][..., ::3] *= 40
    return given


def run(given, lengths=None, **options):
    offsets = {}
    if lengths is not None:
        index = random.choice([torch.int32, torch.int64])
        offsets["cu_seqlens"] = torch.tensor([0, *lengths], device=given["q"].device).cumsum(0).to(index)
    return delta_rule.chunk_kda(**given, scale=0.3, output_final_state=True, **offsets, **options)


def exactly(given, lengths=None, l2norm=False):
    wide = {name: one.detach().cpu().double() for name, one in given.items()}
    return oracle(gk=wide.pop("g"), **wide, scale=0.3, l2norm=l2norm, lengths=lengths)


def check(given, lengths=None, alike=False, **options) -> None:
    bound = bound_of(given, alike)
    o, state = run(given, lengths, **options)
    want, last = exactly(given, lengths, options.get("use_qk_l2norm_in_kernel", False))
    parts = [want.shape[1]] if lengths is None else lengths
    for got, right in zip(o.split(parts, 1), want.split(parts, 1), strict=True):
        assert error(got.transpose(1, 2), right.transpose(1, 2)) < bound
        for part in (slice(64), slice(right.shape[1] // 64 * 64, None)):  # the first chunk and the tail by themselves
            assert error(got[:, part].transpose(1, 2), right[:, part].transpose(1, 2)) < 1.5 * bound
    assert error(state, last) < bound


@pytest.mark.parametrize(
    "heads, value_heads, key_dim, value_dim, batch, tokens",
    [
        (1, 1, 8, 8, 1, 64),
        (1, 2, 64, 64, 2, 190),
        (2, 6, 48, 104, 1, 131),
        (1, 1, 128, 40, 1, 257),
        (2, 26, 40, 56, 4, 65),
        (2, 10, 128, 64, 10, 70),
        (10, 10, 64, 136, 10, 64),
        (1, 13, 120, 128, 8, 129),
    ],
)
@pytest.mark.parametrize("strong", [False, True])
def test_heads_of_every_size(heads, value_heads, key_dim, value_dim, batch, tokens, strong, device):
    for dtype in HALVES:
        shape = dict(heads=heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, tokens=tokens)
        check(kda_inputs(dtype, device, strong, batch=batch, **shape))


@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (128, 128)])
def test_keys_that_are_alike(key_dim, value_dim, device):
    for dtype in HALVES:
        shape = dict(tokens=300, heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim)
        check(kda_inputs(dtype, device, batch=1, alike=True, **shape), alike=True)


def test_random_sequences(device):
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(2, 300)]) for _ in range(7)] + [400]
    for dtype in HALVES:
        given = kda_inputs(
            dtype, device, batch=1, tokens=sum(lengths), sequences=len(lengths), key_dim=64, value_dim=40
        )
        check(given, lengths, use_qk_l2norm_in_kernel=True)


def test_a_neighbour_that_is_not_a_number(device):
    lengths = [100, 90, 80]
    given = kda_inputs(torch.bfloat16, device, batch=1, tokens=270, sequences=3)
    good, state = run(given, lengths)
    for name in ("q", "k", "v", "g", "beta"):
        given[name][:, 100:190] = float("nan")
    o, last = run(given, lengths)
    for got, want in (
        (o[:, :100], good[:, :100]),
        (o[:, 190:], good[:, 190:]),
        (last[0], state[0]),
        (last[2], state[2]),
    ):
        assert got.equal(want)


def test_layouts(device):
    """Views with a head's rows apart, columns first, no initial state: the same numbers, and the same bits twice."""
    given = kda_inputs(torch.bfloat16, device, tokens=140)
    del given["initial_state"]
    want = run(given)
    views = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    o, last = run(given | views, state_v_first=True)
    assert o.equal(want[0]) and last.mT.equal(want[1])
    assert all(one.equal(other) for one, other in zip(run(given), want, strict=True))


@pytest.mark.parametrize("key_dim", [64, 128])
def test_resets(key_dim, device):
    """Logarithms of minus infinity, of a few channels and of all: nothing is not a number, and no digits are lost."""
    given = kda_inputs(torch.float16, device, tokens=150, key_dim=key_dim)
    given["g"][:, [0, 20, 21, 37, 64, 149], :, ::3] = -float("inf")
    given["g"][:, [15, 16, 100]] = -float("inf")
    check(given)


def test_states_are_carried_on(device):
    """A prefill in two pieces is one prefill."""
    given = kda_inputs(torch.bfloat16, device, batch=1, tokens=200)
    whole, last = run(given)
    state = given.pop("initial_state")
    first, middle = run({n: one[:, :128] for n, one in given.items()} | {"initial_state": state})
    second, end = run({n: one[:, 128:] for n, one in given.items()} | {"initial_state": middle})
    assert torch.cat([first, second], 1).equal(whole) and end.equal(last)


def test_both_gates(device):
    """A gate of all channels beside one of each: they add."""
    given = inputs(torch.float16, device, row_gate=True)
    names = ("q", "k", "v", "g", "gk", "beta", "initial_state")
    o, state = operator(*(given[name] for name in names), None, 0.3, True, False, False, True)
    want, last = oracle(**{name: one.cpu().double() for name, one in given.items()}, scale=0.3)
    assert error(o.transpose(1, 2), want.transpose(1, 2)) < bound_of(given) and error(state, last) < bound_of(given)


def check_gradients(given, lengths=None, alike=False, **options) -> None:
    """Each gradient, a head at a time, and what they are gradients of."""
    bound, l2norm = bound_of(given, alike), options.get("use_qk_l2norm_in_kernel", False)
    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    exact = {name: one.cpu().double().requires_grad_() for name, one in given.items()}
    got = run(leaves, lengths, **options)
    rest = {name: one for name, one in exact.items() if name != "g"}
    want = oracle(**rest, gk=exact["g"], scale=0.3, l2norm=l2norm, lengths=lengths)
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, list(leaves.values()), grads)
    right = torch.autograd.grad(want, list(exact.values()), [one.cpu().double() for one in grads])
    for name, one, other in zip(leaves, ours, right, strict=True):
        assert one.dtype == leaves[name].dtype and other.square().mean() > 1e-6
        if name != "initial_state":
            one, other = one.transpose(1, 2), other.transpose(1, 2)
        allowed = (2 if l2norm or name == "g" else 1) * bound
        if name == "beta" and alike and leaves["q"].dtype == torch.float16:
            allowed *= 2  # as in test_chunks_of_half_types
        assert error(one, other) < allowed, name


@pytest.mark.parametrize(
    "heads, value_heads, key_dim, value_dim, batch, tokens, l2norm",
    [
        (1, 1, 8, 8, 1, 64, False),
        (1, 2, 64, 64, 2, 190, False),
        (2, 6, 48, 104, 1, 131, True),
        (1, 1, 128, 40, 1, 257, False),
        (2, 26, 40, 56, 4, 65, False),
        (2, 10, 128, 136, 10, 70, True),
        (5, 15, 64, 136, 7, 64, False),
    ],
)
def test_gradients(heads, value_heads, key_dim, value_dim, batch, tokens, l2norm, device):
    for dtype in HALVES:
        shape = dict(heads=heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, tokens=tokens)
        check_gradients(kda_inputs(dtype, device, batch=batch, **shape), use_qk_l2norm_in_kernel=l2norm)


@pytest.mark.parametrize("key_dim, value_dim, l2norm", [(128, 128, False), (64, 40, True)])
def test_gradients_of_random_sequences(key_dim, value_dim, l2norm, device):
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(2, 200)]) for _ in range(5)] + [320]
    shape = dict(tokens=sum(lengths), sequences=len(lengths), key_dim=key_dim, value_dim=value_dim)
    for dtype in HALVES:
        check_gradients(kda_inputs(dtype, device, batch=1, **shape), lengths, use_qk_l2norm_in_kernel=l2norm)


def test_gradients_of_keys_that_are_alike(device):
    for dtype in HALVES:
        shape = dict(batch=1, tokens=200, heads=1, value_heads=2, key_dim=128, value_dim=64)
        check_gradients(kda_inputs(dtype, device, alike=True, **shape), alike=True)


def test_gradients_where_channels_forget(device):
    """Against float64 those that there are, where some channels forget all; and none is infinite or not a number."""
    given = kda_inputs(torch.bfloat16, device, strong=True, batch=1, tokens=150, key_dim=128)
    check_gradients(given)
    given["g"][:, [0, 20, 21, 37, 64, 149], :, ::3] = -float("inf")
    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    got = torch.autograd.grad(run(leaves)[0].sum(), list(leaves.values()))
    assert all(one.isfinite().all() for one in got)


def test_gradients_of_one_result(device):
    """Of the output alone, of the state alone, without an initial state: and the same bits twice."""
    given = kda_inputs(torch.bfloat16, device, tokens=140)
    leaves = {name: one.clone().requires_grad_() for name, one in given.items() if name != "initial_state"}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in leaves.items()}
    got = run(leaves)
    want = oracle(**{name: one for name, one in exact.items() if name != "g"}, gk=exact["g"], scale=0.3)
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
