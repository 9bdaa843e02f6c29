"""A decoding step of the delta rule against float64: any size, pools of states, slots, raw gates."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule

from .bounds import BOUNDS, wide
from .oracle import delta_rule as oracle
from .oracle import error, inputs


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_step(v_first, state_dtype, device):
    slots, indices = 9, torch.tensor([4, -1, 0, 7], device=device)
    given = inputs(torch.bfloat16, device, batch=4, tokens=3)
    pool = torch.randn(slots, 6, 48, 80, device=device).to(state_dtype)
    pool = pool.mT.contiguous() if v_first else pool
    before, snapshots = pool.clone(), torch.full((4, 5, *pool.shape[1:]), 7.0, device=device, dtype=state_dtype)
    args = {name: given[name] for name in ("q", "k", "v", "g", "beta")}
    states = (before.mT if v_first else before)[indices].cpu().double()
    want, last = oracle(**wide(args), initial_state=states, scale=0.5, l2norm=True)
    kept = delta_rule.delta_rule_step(
        **args, state=pool, scale=0.5, use_qk_l2norm_in_kernel=True, state_v_first=v_first, state_indices=indices,
        update_state=False,
    )  # fmt: skip
    assert pool.equal(before)
    out = torch.full_like(args["v"], float("nan"))
    got = delta_rule.delta_rule_step(
        **args, state=pool, scale=0.5, use_qk_l2norm_in_kernel=True, state_v_first=v_first, state_indices=indices,
        snapshots=snapshots, out=out,
    )  # fmt: skip
    assert got is out and got.equal(kept) and got[1].eq(0).all()
    own = [0, 2, 3]
    assert error(got[own], want[own]) < BOUNDS[torch.bfloat16][0]
    read = (lambda x: x.mT) if v_first else (lambda x: x)
    assert error(read(pool)[indices[own]], last[own]) < BOUNDS[state_dtype][0]
    assert snapshots[own, 2].equal(pool[indices[own]]) and snapshots[:, 3:].eq(7).all() and snapshots[1].eq(7).all()
    others = [i for i in range(slots) if i not in indices[own].tolist()]
    assert pool[others].equal(before[others])


@pytest.mark.parametrize("tokens", [1, 5, 9])
@pytest.mark.parametrize("form", [dict(), dict(row_gate=True), dict(vector=True)], ids=lambda form: str(*form))
@pytest.mark.parametrize("key_dim, value_dim", [(128, 128), (64, 64), (128, 136), (100, 72), (62, 33), (132, 68)])
def test_a_step_of_any_size(key_dim, value_dim, form, tokens, device):
    """Use states with and without whole vectors of four, and more tokens than a step usually has."""
    for dtype, state_dtype in ((torch.float32, torch.float32), (torch.float16, torch.bfloat16)):
        given = inputs(dtype, device, 2, tokens, 1, 2, key_dim, value_dim, **form)
        before = given.pop("initial_state").to(state_dtype)
        want, last = oracle(**wide(given), initial_state=before.cpu().double(), scale=0.5)
        for v_first in (False, True):
            pool = before.mT.contiguous() if v_first else before.clone()
            o = delta_rule.delta_rule_step(**given, state=pool, scale=0.5, state_v_first=v_first)
            assert error(o, want) < BOUNDS[dtype][0]
            assert error(pool.mT if v_first else pool, last) < BOUNDS[state_dtype][0]


def test_a_step_into_other_slots(device):
    given = inputs(torch.float32, device, batch=2, tokens=1)
    args = {name: given[name] for name in ("q", "k", "v", "g", "beta")}
    pool = torch.randn(5, 6, 48, 80, device=device)
    before = pool.clone()
    read, written = torch.tensor([1, 3], device=device), torch.tensor([4, -1], dtype=torch.int32, device=device)
    o = delta_rule.delta_rule_step(**args, state=pool, state_indices=read, output_indices=written)
    want, last = oracle(**wide(args), initial_state=before[read].cpu().double(), scale=48**-0.5)
    assert error(o, want) < 1e-5 and error(pool[4:], last[:1]) < 1e-5 and pool[:4].equal(before[:4])


def test_a_step_of_raw_gates(device):
    given = inputs(torch.float32, device, batch=3, tokens=2, gate=False)
    raw, logits = (torch.randn_like(given["beta"]) for _ in range(2))
    a_log, dt_bias = torch.randn(6, device=device) - 3, torch.randn(6, device=device)
    state = given["initial_state"].clone()
    args = {name: given[name] for name in "qkv"}
    got = delta_rule.delta_rule_step(
        **args, state=state, g=raw, beta=logits, A_log=a_log, dt_bias=dt_bias, beta_is_logit=True, scale=1.0
    )
    plain = given | {"g": -a_log.exp() * torch.nn.functional.softplus(raw + dt_bias), "beta": logits.sigmoid()}
    want, last = oracle(**wide(plain))
    assert error(got, want) < 1e-5 and error(state, last) < 1e-5


def test_steps_are_the_whole(device):
    given = inputs(torch.float32, device, tokens=12)
    want, last = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True)
    state, rows = given.pop("initial_state").clone(), []
    for t in range(12):
        rows.append(delta_rule.delta_rule_step(**{n: one[:, t : t + 1] for n, one in given.items()}, state=state))
    torch.testing.assert_close(torch.cat(rows, 1), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_invalid_slots(device):
    """For a sequence with an invalid slot the result is 0, and neither a slot nor a snapshot is written."""
    given = inputs(torch.float32, device, batch=4, tokens=2)
    pool = given.pop("initial_state")
    mine, snapshots = pool.clone(), pool.new_full((4, 2, *pool.shape[1:]), 77.0)
    slots, to = torch.tensor([2, 4, -1, 0], device=device), torch.tensor([1, 3, 2, 9], device=device)
    o = delta_rule.delta_rule_step(**given, state=mine, state_indices=slots, output_indices=to, snapshots=snapshots)
    whole = {name: one[:1] for name, one in given.items()}
    alone = delta_rule.delta_rule_step(**whole, state=pool[2:3].clone())
    assert o[:1].equal(alone) and not o[1:3].any() and o[3].any()
    assert mine[1].equal(snapshots[0, -1]) and mine[[0, 2, 3]].equal(pool[[0, 2, 3]])
    assert bool((snapshots[1:3] == 77).all()) and not bool((snapshots[3] == 77).any())


@pytest.mark.parametrize("form", ["g", "gk", "gk flat"])
@pytest.mark.parametrize("tokens, key_dim", [(2, 48), (9, 48), (1, 132)], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=str)
def test_a_step_of_raw_gates_with_a_bound_and_of_channels(form, tokens, key_dim, lower_bound, device):
    given = inputs(torch.float32, device, batch=3, tokens=tokens, gate=False, key_dim=key_dim)
    rows = form != "g"
    shape = (3, tokens, 6, key_dim) if rows else (3, tokens, 6)
    raw, a_log = torch.randn(shape, device=device), torch.randn(6, device=device) - (3 if lower_bound is None else 0)
    dt_bias = torch.randn(shape[2:], device=device)
    state, args = given["initial_state"].clone(), {name: given[name] for name in ("q", "k", "v", "beta")}
    x, rate = (one.double().cpu() for one in (raw + dt_bias, a_log.exp().view(6, 1) if rows else a_log.exp()))
    logs = -rate * torch.nn.functional.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    want, last = oracle(**wide(given), **{"gk" if rows else "g": logs})
    got = delta_rule.delta_rule_step(
        **args, state=state, A_log=a_log, dt_bias=dt_bias.flatten() if form == "gk flat" else dt_bias,
        lower_bound=lower_bound, scale=1.0, **{"gk" if rows else "g": raw},
    )  # fmt: skip
    assert error(got, want) < 1e-5 and error(state, last) < 1e-5
    alone = given["initial_state"].clone()
    delta_rule.delta_rule_step(
        **args, state=alone, A_log=a_log, lower_bound=lower_bound, **{"gk" if rows else "g": raw + dt_bias}
    )
    assert error(alone, last) < 1e-5


def test_a_raw_gate_and_computed_channels(device):
    """If g is given, A_log applies to g only, and gk is added unchanged."""
    given = inputs(torch.float32, device, batch=2, tokens=2, row_gate=True)
    raw, a_log = torch.randn_like(given["g"]), torch.randn(6, device=device) - 3
    plain = given | {"g": -a_log.exp() * torch.nn.functional.softplus(raw)}
    want, last = oracle(**wide(plain))
    state = given.pop("initial_state").clone()
    assert error(delta_rule.delta_rule_step(**(given | {"g": raw}), state=state, A_log=a_log, scale=1.0), want) < 1e-5
    assert error(state, last) < 1e-5


@pytest.mark.parametrize("tokens, gap", [(1, 1), (3, 3), (9, 4)], ids=str)
def test_a_pool_with_gaps(tokens, gap, device):
    """Slots are apart, at multiples of a vector or not: another kernel on a GPU. Nothing between them is written."""
    given = inputs(torch.float32, device, batch=3, tokens=tokens)
    given.pop("initial_state")
    size = 6 * 48 * 80
    whole = torch.full((5, size + gap), 77.0, device=device)
    pool = whole[:, :size].view(5, 6, 48, 80)
    pool.copy_(torch.randn_like(pool))
    dense, slots = pool.clone(), torch.tensor([3, -1, 0], device=device)
    o = delta_rule.delta_rule_step(**given, state=pool, state_indices=slots)
    want = delta_rule.delta_rule_step(**given, state=dense, state_indices=slots)
    assert error(o, want) < 1e-6 and error(pool, dense) < 1e-6
    assert pool[[1, 2, 4]].equal(dense[[1, 2, 4]]) and whole[:, size:].eq(77).all()
    before = pool.clone()
    for bad in (pool.mT.contiguous().mT, pool[:1].expand(5, -1, -1, -1)):
        with pytest.raises(ValueError, match="state: is not contiguous, wanted contiguous slots that do not overlap"):
            delta_rule.delta_rule_step(**given, state=bad, state_indices=slots)
    assert pool.equal(before)
