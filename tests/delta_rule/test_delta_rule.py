"""The delta rule against float64: outputs, states, dtypes, layouts and packed sequences."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule

from .bounds import PACKED, check, wide
from .oracle import chunk_bound, error, inputs
from .oracle import delta_rule as oracle


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


def test_digits_after_resets(device):
    """Half of the tokens are resets, and the decays of the tokens between them keep all digits."""
    given = inputs(torch.float32, device, tokens=40)
    given["g"] = given["g"].masked_fill(torch.rand_like(given["g"]) < 0.5, -30.0)
    want = oracle(**wide(given), scale=0.3)
    for function in (delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule):
        result = function(**given, scale=0.3, output_final_state=True)
        # About 30 roundings of 6e-8 (worst seen: 8e-7). Decays from rounded sums cause errors of 4e-6 to 3e-5.
        assert all(error(got, right) < 2e-6 for got, right in zip(result, want, strict=True))


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


@pytest.mark.parametrize("argument", ["A_log", "dt_bias"])
@pytest.mark.parametrize("function", [delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule])
def test_tables_of_gates_are_those_of_heads(function, argument, device):
    """With as many tokens as heads, a column would have been the number of a token, not of a head."""
    given = inputs(torch.float32, device, tokens=6, value_heads=6)
    tables = {name: torch.randn(6, device=device) - 1 for name in ("A_log", "dt_bias")}

    def call(**other: torch.Tensor) -> torch.Tensor:
        return function(**given, use_gate_in_kernel=True, **tables | other)[0]

    want = call()
    for column in (tables[argument][:, None], tables[argument].view(1, 6, 1)):
        assert call(**{argument: column}).equal(want)
    for size in (1, 5, 12):
        with pytest.raises(ValueError, match=rf"{function.__name__}: {argument}: got shape \[{size}\], wanted \[6\]"):
            call(**{argument: torch.ones(size, device=device)})


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
