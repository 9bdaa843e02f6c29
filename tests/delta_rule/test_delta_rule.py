"""The delta rule against float64: outputs, states, steps of decoding, and errors."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule
from flashinfer.errors import GradientError

from .oracle import chunk_bound, error, inputs
from .oracle import delta_rule as oracle

# Relative errors of an output and of a state. Those of half types allow the rounding of every element.
BOUNDS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (4e-3, 1e-5),
    torch.float16: (5e-4, 1e-5),
}


def wide(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.detach().cpu().double() for name, one in given.items()}


def check(result, expected, dtype, rounded=None) -> None:
    """Compare with the oracle. ``rounded``: the bound per head if operands were rounded."""
    bounds = BOUNDS[dtype]
    if rounded is not None:
        bounds = rounded, rounded
        result, expected = ((o.transpose(1, 2), state) for o, state in (result, expected))
    for got, want, bound in zip(result, expected, bounds, strict=True):
        assert want.square().mean() > 1e-6
        assert error(got, want) < bound


def dtypes_of(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if device == "cpu" else [])]


SHAPES = [
    dict(),
    dict(batch=1, tokens=1, heads=1, value_heads=1, key_dim=1, value_dim=40),
    dict(batch=3, tokens=17, heads=3, value_heads=3, key_dim=64, value_dim=33),
    dict(batch=1, tokens=70, heads=1, value_heads=2, key_dim=128, value_dim=128),
    dict(batch=1, tokens=20, heads=2, value_heads=2, key_dim=256, value_dim=100, alike=True),
    dict(batch=2, tokens=40, heads=1, value_heads=3, key_dim=60, value_dim=100, alike=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())) or "default")
def test_recurrent_and_chunk(shape, device):
    for dtype in dtypes_of(device):
        given = inputs(dtype, device, **shape)
        want = oracle(**wide(given), scale=0.3)
        result = delta_rule.fused_recurrent_gated_delta_rule(**given, scale=0.3, output_final_state=True)
        check(result, want, dtype)
        state = given.pop("initial_state")
        again = delta_rule.chunk_gated_delta_rule(**given, scale=0.3, initial_state=state, output_final_state=True)
        check(again, want, dtype, chunk_bound(given, shape.get("alike", False)))
        o, none = delta_rule.chunk_gated_delta_rule(**given, scale=0.3, initial_state=state)
        assert none is None and o.equal(again[0])


def test_the_state_matters():
    """Check that inputs test the state: most of an output comes from tokens long before."""
    given = wide(inputs(torch.float64, "cpu", gate=False))
    whole, _ = oracle(**given)
    given = {name: one if name == "initial_state" else one[:, 64:] for name, one in given.items()}
    given["initial_state"] = torch.zeros_like(given["initial_state"])
    alone, _ = oracle(**given)
    assert (whole[:, 64:] - alone).norm() > 0.5 * whole[:, 64:].norm()


@pytest.mark.parametrize("l2norm", [False, True])
def test_ungated(l2norm, device, dtype):
    given = inputs(dtype, device, gate=False)
    want = oracle(**wide(given), scale=48**-0.5, l2norm=l2norm)
    for function in (delta_rule.fused_recurrent_delta_rule, delta_rule.chunk_delta_rule):
        rounded = chunk_bound(given) if function is delta_rule.chunk_delta_rule else None
        check(function(**given, output_final_state=True, use_qk_l2norm_in_kernel=l2norm), want, dtype, rounded)


def test_beta_of_columns_and_gates_of_rows(device, dtype):
    vector = inputs(dtype, device, gate=False, vector=True)
    check(
        delta_rule.fused_recurrent_delta_rule(**vector, scale=-1.0, output_final_state=True),
        oracle(**wide(vector), scale=-1.0),
        dtype,
    )
    rows = inputs(dtype, device, row_gate=True)
    result = delta_rule.fused_recurrent_gated_delta_rule(**rows, scale=1.0, output_final_state=True)
    check(result, oracle(**wide(rows)), dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences(index, device):
    lengths = [0, 5, 1, 70, 0, 20, 3]
    given = inputs(torch.float32, device, batch=1, tokens=sum(lengths), sequences=len(lengths))
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(index)
    result = delta_rule.chunk_gated_delta_rule(
        **given, scale=0.3, output_final_state=True, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True
    )
    check(result, oracle(**wide(given), scale=0.3, l2norm=True, lengths=lengths), torch.float32)
    assert result[1][0].equal(given["initial_state"][0])  # a sequence of no tokens


def test_nan_stays_in_its_sequence(device):
    lengths = [9, 20, 13]
    given = inputs(torch.float32, device, batch=1, tokens=sum(lengths), sequences=3)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    good, state = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True, cu_seqlens=offsets)
    for name in ("q", "k", "v", "g", "beta"):
        given[name][:, 9:29] = float("nan")
    given["g"][:, 9:29] = -float("inf")
    o, last = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True, cu_seqlens=offsets)
    for got, want in ((o[:, :9], good[:, :9]), (o[:, 29:], good[:, 29:]), (last[0], state[0]), (last[2], state[2])):
        assert got.equal(want)


def test_layouts(device):
    """Use transposed views, states with columns first and gates of half types. Results are equal."""
    given = inputs(torch.float32, device)
    want = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True)
    views = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    views["v"] = given["v"].transpose(1, 3).contiguous().transpose(1, 3)
    state = given["initial_state"].mT.contiguous()
    o, last = delta_rule.chunk_gated_delta_rule(
        **(given | views | {"initial_state": state}), output_final_state=True, state_v_first=True
    )
    assert o.equal(want[0]) and last.mT.equal(want[1])


def test_gates_in_the_kernel(device):
    given = inputs(torch.float32, device, gate=False)
    raw, logits = (torch.randn_like(given["beta"]) for _ in range(2))
    a_log, dt_bias = torch.randn(6, device=device) - 3, torch.randn(6, device=device)
    plain = given | {"g": -a_log.exp() * torch.nn.functional.softplus(raw + dt_bias), "beta": 2 * logits.sigmoid()}
    result = delta_rule.fused_recurrent_gated_delta_rule(
        **(given | {"g": raw, "beta": logits}), output_final_state=True, use_gate_in_kernel=True, A_log=a_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, scale=1.0,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    check(result, oracle(**wide(plain), l2norm=True), torch.float32)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_no_sequences(tokens, device):
    given = inputs(torch.float32, device, tokens=1)
    empty = {name: one if name == "initial_state" else one[:, :tokens] for name, one in given.items()}
    o, state = delta_rule.chunk_gated_delta_rule(**empty, output_final_state=True)
    assert o.shape == empty["v"].shape and state.shape == given["initial_state"].shape
    if tokens == 0:
        assert state.equal(given["initial_state"]) and state.data_ptr() != given["initial_state"].data_ptr()
    none = {name: one[:0] for name, one in given.items()}
    o, state = delta_rule.chunk_gated_delta_rule(**none, output_final_state=True)
    assert o.shape[0] == state.shape[0] == 0


def test_the_same_bits(device, dtype):
    given = inputs(dtype, device)
    first = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True)
    again = delta_rule.chunk_gated_delta_rule(**given, output_final_state=True)
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))
    alone = delta_rule.chunk_gated_delta_rule(**{n: one[1:] for n, one in given.items()}, output_final_state=True)
    assert alone[0].equal(first[0][1:])


# ---- a step of decoding --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "q, k, v, computed",
    [
        (torch.float32, torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_dtypes_that_differ(q, k, v, computed, device):
    """Promote all inputs. The output has v's dtype, and each gradient that of its tensor."""
    given = inputs(torch.float32, device, tokens=70)
    given |= {"q": given["q"].to(q), "k": given["k"].to(k), "v": given["v"].to(v)}
    leaves = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
    for function in (delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule):
        o, state = function(**leaves, scale=0.3, output_final_state=True)
        promoted = given | {name: given[name].to(computed) for name in "qkv"}
        want, last = function(**promoted, scale=0.3, output_final_state=True)
        assert o.dtype == v and o.equal(want.to(v)) and state.equal(last)
        for leaf, grad in zip(leaves.values(), torch.autograd.grad(o.sum(), list(leaves.values())), strict=True):
            assert grad.dtype == leaf.dtype and grad.isfinite().all()


# ---- errors --------------------------------------------------------------------------------------------------------

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


def strided(values: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return integers with a stride of 3, between other numbers."""
    wide = torch.full((len(values), 3), 99, device=device).to(dtype)
    wide[:, 1] = torch.tensor(values, device=device).to(dtype)
    return wide[:, 1]


INDEX_DTYPES = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
PACKED = ["chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_delta_rule",
          "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]  # fmt: skip


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_indices_of_any_integers_and_strides(index_dtype, device):
    given = inputs(torch.float32, device, batch=1, tokens=12, sequences=3, row_gate=True)
    offsets, state = [0, 5, 5, 12], given["initial_state"]
    for name in PACKED:
        args = {one: given[one] for one in ("q", "k", "v", "beta")}
        if "gated" in name:
            args["g"] = given["g"]
        elif "kda" in name:
            args["g"] = given["gk"]
        dense = torch.tensor(offsets, device=device)
        want = getattr(delta_rule, name)(**args, initial_state=state, output_final_state=True, cu_seqlens=dense)
        got = getattr(delta_rule, name)(
            **args, initial_state=state, output_final_state=True, cu_seqlens=strided(offsets, index_dtype, device)
        )
        assert got[0].equal(want[0]) and got[1].equal(want[1])
    step = {
        name: one for name, one in inputs(torch.float32, device, batch=3, tokens=1).items() if name != "initial_state"
    }
    pool = torch.randn(7, 6, 48, 80, device=device)
    mine, other = pool.clone(), pool.clone()
    read, written = [6, 0, 3], [1, 4, 2]
    o = delta_rule.delta_rule_step(
        **step, state=mine, state_indices=torch.tensor(read, device=device),
        output_indices=torch.tensor(written, device=device),
    )  # fmt: skip
    again = delta_rule.delta_rule_step(
        **step, state=other, state_indices=strided(read, index_dtype, device),
        output_indices=strided(written, index_dtype, device),
    )  # fmt: skip
    assert again.equal(o) and other.equal(mine)


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
