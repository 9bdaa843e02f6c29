"""Kimi Delta Attention (one decay per row of a state) against float64, and FlashInfer's name for its steps."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import delta_rule
from flashinfer.errors import GradientError

from .oracle import delta_rule as oracle
from .oracle import error, inputs


def kda_inputs(device: str, **shape) -> dict[str, torch.Tensor]:
    given = inputs(torch.float32, device, gate=False, row_gate=True, **shape)
    given["g"] = given.pop("gk")
    return given


def exactly(given, **options):
    wide = {name: one.detach().cpu().double() for name, one in given.items()}
    return oracle(gk=wide.pop("g"), **wide, **options)


@pytest.mark.parametrize("function", ["fused_recurrent_kda", "chunk_kda"])
def test_sequences_and_gradients(function, device):
    lengths = [5, 0, 1, 30]
    given = kda_inputs(device, batch=1, tokens=sum(lengths), sequences=len(lengths))
    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    exact = {name: one.cpu().double().requires_grad_() for name, one in given.items()}
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    got = getattr(delta_rule, function)(**leaves, scale=0.3, output_final_state=True, cu_seqlens=offsets)
    rest = {name: one for name, one in exact.items() if name != "g"}
    want = oracle(**rest, gk=exact["g"], scale=0.3, lengths=lengths)
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, list(leaves.values()), grads)
    right = torch.autograd.grad(want, list(exact.values()), [one.cpu().double() for one in grads])
    for one, other in zip((*got, *ours), (*want, *right), strict=True):
        if one.dim() == 3:
            one, other = one.mT, other.mT
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gates(lower_bound, device):
    given = kda_inputs(device, tokens=20)
    raw, logits = torch.randn_like(given["g"]), torch.randn_like(given["beta"])
    a_log, dt_bias = (torch.randn(6, device=device) - 2).requires_grad_(), torch.randn(6 * 48, device=device)
    dt_bias.requires_grad_()
    rate, shifted = a_log.detach().exp()[:, None], raw + dt_bias.detach().view(6, 48)
    if lower_bound is None:
        g = -rate * torch.nn.functional.softplus(shifted)
    else:
        g = lower_bound * (rate * shifted).sigmoid()
    want = exactly(given | {"g": g, "beta": logits.sigmoid()}, scale=48**-0.5, l2norm=True)
    o, state = delta_rule.chunk_kda(
        **(given | {"g": raw, "beta": logits}), output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=a_log, dt_bias=dt_bias,
        lower_bound=lower_bound, safe_gate=lower_bound is not None,
    )  # fmt: skip
    # The gate is computed in float32. Its errors add up over twenty tokens.
    assert error(o, want[0]) < 2e-5 and error(state, want[1]) < 2e-5
    assert all(one.abs().max() > 0 for one in torch.autograd.grad(o.square().sum(), (a_log, dt_bias)))


def test_a_bias_of_the_transposed_shape_is_an_error(device):
    """Such a bias has the right number of elements, in another order."""
    given = kda_inputs(device, tokens=5)
    options = dict(use_gate_in_kernel=True, A_log=torch.randn(1, 1, 6, 1, device=device))
    bias = torch.randn(6, 48, device=device)
    flat, shaped = (delta_rule.chunk_kda(**given, **options, dt_bias=one)[0] for one in (bias.flatten(), bias))
    assert torch.equal(flat, shaped)
    with pytest.raises(ValueError, match=r"chunk_kda: dt_bias: got shape \[48, 6\], wanted \[6, 48\]"):
        delta_rule.chunk_kda(**given, **options, dt_bias=bias.mT.contiguous())


def test_steps_in_place(device):
    given = kda_inputs(device, batch=3, tokens=2)
    want, last = exactly(given, scale=48**-0.5, l2norm=True)
    states = given.pop("initial_state").mT.contiguous()
    mine = states.clone()
    o, state = flashinfer.recurrent_kda(**given, initial_state=mine, output_final_state=True)
    assert state is mine and error(o, want) < 1e-5 and error(mine.mT, last) < 1e-5
    pool = torch.randn(7, 6, 80, 48, device=device)
    slots, before = torch.tensor([5, -1, 2], device=device), pool.clone()
    pool[5], pool[2] = states[0], states[2]
    out = torch.full_like(given["v"], float("nan"))
    o, none = flashinfer.recurrent_kda(**given, initial_state=pool, ssm_state_indices=slots, output=out)
    assert none is None and o is out and not o[1].any()
    for row, slot in ((0, 5), (2, 2)):
        assert error(o[row : row + 1], want[row : row + 1]) < 1e-5
        assert error(pool[slot : slot + 1].mT, last[row : row + 1]) < 1e-5
    untouched = [0, 1, 3, 4, 6]
    assert pool[untouched].equal(before[untouched])
    again, _ = flashinfer.recurrent_kda(
        **{name: one.flatten(0, 1)[None] for name, one in given.items()}, initial_state=states,
        cu_seqlens=torch.tensor([0, 2, 4, 6], device=device),
    )  # fmt: skip
    assert error(again.view(want.shape), want) < 1e-5 and error(states.mT, last) < 1e-5


def test_refused(device):
    given = kda_inputs(device, tokens=9)
    state = given["initial_state"].mT.contiguous()
    for change, text in (
        (dict(g=given["beta"]), "g: got 3 dimensions, wanted 4"),
        (dict(lower_bound=0.5), "lower_bound: got 0.5"),
        (dict(lower_bound=-6.0, safe_gate=True), "lower_bound: got -6.0, wanted -5 or more"),
        (dict(use_gate_in_kernel=True), "A_log: got None"),
        (dict(A_log=given["beta"][0, 0]), "use_gate_in_kernel: got False"),
        (dict(A_log=given["beta"], use_gate_in_kernel=True), "A_log: got shape"),
        (dict(chunk_size=16), "chunk_size: got 16, wanted 32 or 64"),
        (dict(allow_neg_eigval=True), "allow_neg_eigval: got True"),
    ):
        with pytest.raises(ValueError, match=text):
            delta_rule.chunk_kda(**(given | change))
    given["initial_state"] = state
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    for change, text in (
        (dict(initial_state_source=state), "initial_state_source: got both"),
        (dict(ssm_state_indices=slots, initial_state_indices=slots), "initial_state_indices: got both"),
        (dict(initial_state=None, ssm_state_indices=slots), "initial_state: got None"),
        (
            dict(ssm_state_indices=slots, cu_seqlens=slots),
            "ssm_state_indices: got both, wanted only ssm_state_indices or only cu_seqlens",
        ),
        (dict(output=given["v"][:1]), "output: got"),
        (dict(initial_state=state.mT), "initial_state: got shape"),
    ):
        with pytest.raises(ValueError, match=text):
            flashinfer.recurrent_kda(**(given | change))
    before, one = state.clone(), {name: given[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    one |= dict(initial_state=state, cu_seqlens=torch.tensor([0, 9, 18], device=device))
    for kind, change, text in (
        (TypeError, dict(initial_state=state.int()), "initial_state: got torch.int32, wanted torch.float32"),
        (TypeError, dict(initial_state=1.0), "initial_state: got float, wanted Tensor"),
        (ValueError, dict(initial_state=state[:1]), "initial_state: got shape"),
        (ValueError, dict(initial_state=state.to("meta")), "initial_state: got a tensor on meta"),
        (ValueError, dict(output=given["v"]), "output: got shape"),
        (TypeError, dict(output=one["v"].half()), "output: got torch.float16"),
        (ValueError, dict(output=one["v"].to("meta")), "output: got a tensor on meta"),
    ):
        with pytest.raises(kind, match=f"^recurrent_kda: {text}"):
            flashinfer.recurrent_kda(**(one | change))
    assert state.equal(before)
    with pytest.raises(GradientError):
        flashinfer.recurrent_kda(**(given | {"q": given["q"].requires_grad_()}))


def test_raw_gates_that_want_a_gradient_are_refused(device):
    given = inputs(torch.float32, device, batch=2, tokens=1, row_gate=True)
    call = {name: given[name] for name in ("q", "k", "v", "beta")} | dict(g=given["gk"], use_gate_in_kernel=True)
    A_log, dt_bias = torch.randn(6, device=device), torch.randn(6, 48, device=device)
    for change in (dict(A_log=A_log.clone().requires_grad_()), dict(dt_bias=dt_bias.clone().requires_grad_())):
        with pytest.raises(GradientError, match="^recurrent_kda: has no gradient"):
            flashinfer.recurrent_kda(**(call | dict(A_log=A_log, dt_bias=dt_bias) | change))
    with torch.no_grad():
        flashinfer.recurrent_kda(**call, A_log=A_log.clone().requires_grad_(), dt_bias=dt_bias)
