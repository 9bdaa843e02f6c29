"""Arguments that the delta rule refuses, before anything is written."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule
from flashinfer.errors import GradientError

from .bounds import PACKED
from .oracle import inputs

MISTAKES = [
    (
        ValueError,
        "q: got 3 dimensions, wanted 4, or three in flashinfer.chunk_gated_delta_rule",
        lambda x: dict(q=x["q"][0]),
    ),
    (ValueError, "k: got shape", lambda x: dict(k=x["k"][..., :-1])),
    (ValueError, "v: got shape", lambda x: dict(v=x["v"][:, :-1])),
    (ValueError, "v: got 5 heads, wanted a multiple", lambda x: dict(v=x["v"][:, :, :5])),
    (TypeError, "q: got int32", lambda x: dict(q=x["q"].int())),
    (TypeError, "k: got int32, wanted float32", lambda x: dict(k=x["k"].int())),
    (TypeError, "v: got float8_e4m3fn", lambda x: dict(v=x["v"].to(torch.float8_e4m3fn))),
    (ValueError, "g: got shape", lambda x: dict(g=x["g"][:, :-1])),
    (ValueError, "beta: got shape", lambda x: dict(beta=x["beta"][:, :, :-1])),
    (ValueError, "initial_state: got shape", lambda x: dict(initial_state=x["initial_state"].mT)),
    (ValueError, "one device|another device|on meta", lambda x: dict(k=x["k"].to("meta"))),
    (ValueError, "wanted 1 with cu_seqlens", lambda x: dict(cu_seqlens=torch.tensor([0, 9], device=x["q"].device))),
    (
        ValueError,
        "cu_seqlens: got one element, wanted at least two with 9 tokens",
        lambda x: {name: one[:1] for name, one in x.items()} | dict(cu_seqlens=x["q"].new_zeros(1, dtype=torch.int64)),
    ),
    (
        TypeError,
        "cu_seqlens: got torch.float32, wanted torch.int32, torch.int64",
        lambda x: dict(cu_seqlens=torch.zeros(2, device=x["q"].device)),
    ),
    (TypeError, "scale: got a Tensor", lambda x: dict(scale=torch.tensor(1.0))),
    (ValueError, "allow_neg_eigval: got True", lambda x: dict(allow_neg_eigval=True)),
    (ValueError, "A_log: got None", lambda x: dict(use_gate_in_kernel=True)),
    (ValueError, "wanted True with A_log", lambda x: dict(A_log=x["g"][0, 0])),
    (TypeError, "head_first", lambda x: dict(head_first=True)),
    (ValueError, "chunk_size: got 48", lambda x: dict(chunk_size=48)),
    (TypeError, "beta: got NoneType, wanted Tensor", lambda x: dict(beta=None)),
    (TypeError, "g: got float, wanted Tensor", lambda x: dict(g=1.0)),
    (TypeError, "g: got float, wanted Tensor", lambda x: dict(g=1.0, A_log=x["g"][0, 0], use_gate_in_kernel=True)),
    (TypeError, "initial_state: got float, wanted Tensor", lambda x: dict(initial_state=1.0)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_refused(mistake, device):
    kind, text, change = mistake
    given = inputs(torch.float32, device, tokens=9)
    with pytest.raises(kind, match=text):
        delta_rule.chunk_gated_delta_rule(**(given | change(given)))


@pytest.mark.parametrize("offsets", [[1, 9], [0, 5, 3, 9], [0, 8], [0, 12]], ids=str)
def test_offsets_are_checked_on_the_cpu(offsets):
    given = inputs(torch.float32, "cpu", batch=1, tokens=9, sequences=len(offsets) - 1)
    with pytest.raises(ValueError, match="cu_seqlens: got .* that do not decrease"):
        delta_rule.chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor(offsets))


def test_decays_instead_of_logarithms_are_refused():
    given = inputs(torch.float32, "cpu", tokens=9)
    with pytest.raises(ValueError, match="g: got numbers above 0"):
        delta_rule.chunk_gated_delta_rule(**(given | {"g": given["g"].exp()}))
    with pytest.raises(ValueError, match="gv: got Tensor, wanted None"):
        delta_rule.fused_recurrent_gated_delta_rule(**given, gv=given["v"])


def test_a_step_has_no_gradient(device):
    given = inputs(torch.float32, device, tokens=1)
    state = given.pop("initial_state")
    with pytest.raises(GradientError, match="delta_rule_step"):
        delta_rule.delta_rule_step(**(given | {"q": given["q"].requires_grad_()}), state=state)
    given["q"] = given["q"].detach()
    before = state.clone()
    for change, text in (
        (dict(beta=1.0), "beta: got float, wanted Tensor"),
        (dict(out=given["v"][:1]), "out: got shape"),
        (dict(out=given["v"].half()), "out: got torch.float16, wanted torch.float32"),
        (dict(out=given["v"].to("meta")), "out: got a tensor on meta"),
        (dict(state=state[:1]), "state: got shape"),
        (dict(state=state.mT), "state: got shape"),
        (dict(state=state.int()), "state: got torch.int32"),
        (dict(A_log=state[0, :, 0, 0], g=None), "g: got None, wanted the raw gate"),
        (dict(beta_is_logit=True, beta=None), "beta: got None, wanted logits"),
        (dict(state_indices=torch.zeros(3, dtype=torch.int64, device=device)), "state_indices: got shape"),
        (dict(snapshots=state[:, None, :, :, :-1]), "snapshots: got shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            delta_rule.delta_rule_step(**(dict(given, state=state) | change))
    assert state.equal(before)
    with pytest.raises(TypeError, match="chunk_delta_rule: beta: got NoneType, wanted Tensor"):
        delta_rule.chunk_delta_rule(given["q"], given["k"], given["v"], None)


def test_a_step_refuses_decays_and_states_of_eight_bits(device):
    given = inputs(torch.float32, device, tokens=1, row_gate=True)
    state = given.pop("initial_state")
    before, out = state.clone(), torch.full_like(given["v"], 77.0)
    eight = torch.float8_e4m3fn
    changes = [
        (TypeError, "state: got torch.float8_e4m3fn, .*no scale", dict(state=state.to(eight))),
        (TypeError, "state: got torch.int32", dict(state=state.int())),
        (TypeError, "g: got torch.float8_e4m3fn", dict(g=given["g"].to(eight))),
        (TypeError, "beta: got torch.int64", dict(beta=given["beta"].long())),
        (TypeError, "state_indices: got torch.float32", dict(state_indices=torch.zeros(2, device=device))),
        (ValueError, "lower_bound: got 1.0, wanted a number below 0", dict(lower_bound=1.0)),
        (ValueError, "lower_bound: got nan, wanted a number below 0", dict(lower_bound=float("nan"))),
        (ValueError, "A_log: got None, wanted it for lower_bound", dict(lower_bound=-5.0)),
        (ValueError, "dt_bias: got shape", dict(g=None, A_log=given["g"][0, 0], dt_bias=given["gk"][0, 0].t())),
        (ValueError, "dt_bias: got shape", dict(A_log=given["g"][0, 0], dt_bias=given["gk"][0, 0])),
        (ValueError, "q: got 3 dimensions, wanted 4, or three in flashinfer.chunk_gated", dict(q=given["q"][0])),
    ]
    if device == "cpu":  # on CUDA this check would wait for the device
        taker = "flashinfer.chunk_gated_delta_rule takes decays"
        changes += [
            (ValueError, f"g: got numbers above 0, .*{taker}", dict(g=given["g"].exp())),
            (ValueError, f"gk: got numbers above 0, .*{taker}", dict(gk=given["gk"].exp())),
        ]
    for kind, text, change in changes:
        with pytest.raises(kind, match=f"delta_rule_step: {text}"):
            delta_rule.delta_rule_step(**(dict(given, state=state, out=out) | change))
    assert state.equal(before) and (out == 77).all()
    for name in PACKED:
        args = {one: given[one] for one in ("q", "k", "v", "beta")} | ({"g": given["gk"]} if "kda" in name else {})
        if "gated" in name:
            args["g"] = given["g"]
        with pytest.raises(TypeError, match=f"^{name}: initial_state: got torch.float8_e4m3fn"):
            getattr(delta_rule, name)(**args, initial_state=state.to(eight))


@pytest.mark.parametrize("name", PACKED)
def test_packed_calls_name_the_other_function(name, device):
    given = inputs(torch.float32, device, batch=1, tokens=7, row_gate=True)
    args = {one: given[one][0] for one in ("q", "k", "v", "beta")}
    if name not in ("chunk_delta_rule", "fused_recurrent_delta_rule"):
        args["g"] = given["g"][0].exp()
    with pytest.raises(ValueError, match=f"^{name}: q: got 3 .*three in flashinfer.chunk_gated_delta_rule"):
        getattr(delta_rule, name)(**args)
