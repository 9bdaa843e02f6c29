"""Steps of one token with many states of 128 x 128: on Hopper, blocks go from head to head, and states by bulk copies."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule

from .oracle import delta_rule as oracle
from .oracle import error, inputs
from .test_delta_rule import BOUNDS, wide

HEADS = 12


def sequences(device: str) -> int:
    """As many as it takes for four heads for each processor, and for some blocks to have one more than others."""
    if device == "cpu":
        return 2
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count // HEADS + 4


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("form", [dict(), dict(row_gate=True), dict(vector=True)], ids=lambda form: str(*form))
@pytest.mark.parametrize(
    "dtype, state_dtype",
    [
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16), (torch.float16, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_steps(dtype, state_dtype, form, v_first, device):
    given = inputs(dtype, device, sequences(device), 1, HEADS // 3, HEADS, 128, 128, **form)
    before, l2norm = given.pop("initial_state").to(state_dtype), "row_gate" in form
    want, last = oracle(**wide(given), initial_state=before.cpu().double(), scale=0.5, l2norm=l2norm)
    pool = before.mT.contiguous() if v_first else before.clone()
    o = delta_rule.delta_rule_step(
        **given, state=pool, scale=0.5, state_v_first=v_first, use_qk_l2norm_in_kernel=l2norm
    )
    assert error(o, want) < BOUNDS[dtype][0]
    assert error(pool.mT if v_first else pool, last) < BOUNDS[state_dtype][0]


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots(state_dtype, v_first, device):
    """Each sequence reads one slot and writes another, or its own; some have none, some leave what they make nowhere."""
    count = sequences(device) + 3
    given = inputs(torch.bfloat16, device, count, 1, HEADS, HEADS, 128, 128)
    del given["initial_state"]
    slots = 2 * count + 5
    pool = torch.randn(slots, HEADS, 128, 128, device=device).to(state_dtype)
    before = pool.clone()
    order = torch.randperm(slots, device=device)
    read, written = order[:count].clone(), order[count : 2 * count].clone()
    written[2] = read[2]
    read[[1, count - 1]] = -1
    written[0] = -1
    kept = delta_rule.delta_rule_step(
        **given, state=pool, state_indices=read, state_v_first=v_first, update_state=False
    )
    assert pool.equal(before)
    o = delta_rule.delta_rule_step(
        **given, state=pool, state_indices=read, output_indices=written, state_v_first=v_first
    )
    assert o.equal(kept) and o[[1, count - 1]].eq(0).all()
    own = [i for i in range(count) if i not in (1, count - 1)]
    args = {name: one[own] for name, one in given.items()}
    states = before.mT if v_first else before
    want, last = oracle(**wide(args), initial_state=states[read[own]].cpu().double(), scale=128**-0.5)
    assert error(o[own], want) < BOUNDS[torch.bfloat16][0]
    after = (pool.mT if v_first else pool)[written[own[1:]]]
    assert error(after, last[1:]) < BOUNDS[state_dtype][0]
    changed = set(written[own[1:]].tolist())
    others = [i for i in range(slots) if i not in changed]
    assert pool[others].equal(before[others])


def test_raw_gates(device):
    given = inputs(torch.bfloat16, device, sequences(device), 1, HEADS, HEADS, 128, 128, gate=False)
    raw, logits = (torch.randn_like(given["beta"]) for _ in range(2))
    a_log, dt_bias = torch.randn(HEADS, device=device) - 3, torch.randn(HEADS, device=device)
    state, args = given["initial_state"].clone(), {name: given[name] for name in "qkv"}
    got = delta_rule.delta_rule_step(
        **args, state=state, g=raw, beta=logits, A_log=a_log, dt_bias=dt_bias, beta_is_logit=True, scale=1.0
    )
    plain = given | {"g": -a_log.exp() * torch.nn.functional.softplus(raw + dt_bias), "beta": logits.sigmoid()}
    want, last = oracle(**wide(plain))
    assert error(got, want) < BOUNDS[torch.bfloat16][0] and error(state, last) < 1e-5
