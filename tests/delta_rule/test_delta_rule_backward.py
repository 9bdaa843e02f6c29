"""Gradients of the delta rule against autograd in float64 and against finite differences of the kernels."""

from __future__ import annotations

import pytest
import torch

from flashinfer import delta_rule
from flashinfer.errors import GradientError

from .oracle import delta_rule as oracle
from .oracle import error, inputs

# float32: about 10 times the effect of its rounding (6e-8) over up to 70 tokens. Half types: the rounding of every
# element.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-12}


def run(given, **options):
    names = set(given) - {"q", "k", "v", "initial_state"}
    if names == {"beta"}:
        return delta_rule.fused_recurrent_delta_rule(**given, output_final_state=True, **options)
    return delta_rule.fused_recurrent_gated_delta_rule(**given, output_final_state=True, **options)


def terms_of_gates(o, grad_o, v, grad_v, state, grad_state, lengths):
    """Return the magnitude of the terms of each gate's gradient, ``[batch, tokens, heads]``.

    The gradient is <S, dS> of the last state plus <o, do> - <v, dv> of the gate's token and of all later ones. The
    result adds the absolute values of all products.
    """
    tokens = (o * grad_o).abs().sum(-1) + (v * grad_v).abs().sum(-1)
    last = (state * grad_state).abs().sum((-1, -2))[:, None]
    if lengths is None:
        return tokens.flip(1).cumsum(1).flip(1) + last
    parts = zip(tokens.split(lengths, 1), last, strict=True)
    return torch.cat([part.flip(1).cumsum(1).flip(1) + end for part, end in parts], 1)


def check(given, scale=0.3, l2norm=False, lengths=None, of=("o", "state")) -> None:
    """Compare every gradient with float64.

    Errors of vectors are relative to each part. A gate or a beta has one number per token and head, a sum whose
    terms may cancel, so its error is relative to the magnitudes of the terms.
    """
    device, dtype = given["q"].device, given["q"].dtype
    leaves = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
    exact = {name: one.detach().cpu().double() for name, one in given.items()}
    sums = [name for name, one in given.items() if one.dim() == 3]
    if "beta" in sums:  # gradients of a beta per column are the terms
        exact["beta"] = exact["beta"][..., None].repeat(1, 1, 1, given["v"].shape[3])
    exact = {name: one.requires_grad_() for name, one in exact.items()}
    options = {} if lengths is None else {"cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0)}
    result = dict(zip(("o", "state"), run(leaves, scale=scale, use_qk_l2norm_in_kernel=l2norm, **options), strict=True))
    want = dict(zip(("o", "state"), oracle(**exact, scale=scale, l2norm=l2norm, lengths=lengths), strict=True))
    grads = {name: torch.randn_like(result[name]) for name in of}
    wide = {name: one.cpu().double() for name, one in grads.items()}
    used = [name for name in leaves if of != ("state",) or name != "q"]
    got = torch.autograd.grad([result[name] for name in of], [leaves[name] for name in used], list(grads.values()))
    right = torch.autograd.grad([want[name] for name in of], [exact[name] for name in used], list(wide.values()))
    right = dict(zip(used, right, strict=True))
    terms = {"beta": right["beta"].abs().sum(-1)}
    if "beta" in sums:
        right["beta"] = right["beta"].sum(-1)
    if "g" in sums:
        zero = torch.zeros(())
        terms["g"] = terms_of_gates(
            want["o"], wide.get("o", zero), exact["v"], right["v"], want["state"], wide.get("state", zero), lengths
        )
    for name, one in zip(used, got, strict=True):
        other, bound = right[name], BOUNDS[torch.float32 if leaves[name].dtype == torch.float32 else dtype]
        assert other.square().mean() > 1e-8 or not other.numel()
        assert one.dtype == leaves[name].dtype and one.shape == other.shape
        if name not in sums:
            assert error(one, other) < (4 if l2norm else 1) * bound  # dy - y <y, dy> cancels digits
        elif other.numel():
            worst = (one.cpu().double() - other).abs().max() / terms[name].square().mean().sqrt()
            assert worst.item() < bound


SHAPES = [
    dict(tokens=67),
    dict(batch=1, tokens=3, heads=1, value_heads=1, key_dim=40, value_dim=33),
    dict(batch=1, tokens=33, heads=3, value_heads=3, key_dim=128, value_dim=128),
    dict(batch=1, tokens=21, heads=2, value_heads=4, key_dim=256, value_dim=150),
    dict(batch=2, tokens=40, heads=1, value_heads=3, key_dim=60, value_dim=140, alike=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())) or "default")
@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
def test_gated(shape, l2norm, dtype, device):
    check(inputs(dtype, device, **shape), l2norm=l2norm)


@pytest.mark.parametrize("chunked", [False, True])
def test_strong_gates_have_no_gradient(chunked):
    """Check on the CPU that gates of -26 have no gradient, and that rounding after them affects no earlier gradient."""
    given = inputs(torch.float32, "cpu", tokens=75)
    given["g"][:, 20:] = -26.0
    given["v"][:, 20:] *= 1e4
    leaves = {name: one.requires_grad_() for name, one in given.items()}
    function = delta_rule.chunk_gated_delta_rule if chunked else delta_rule.fused_recurrent_gated_delta_rule
    o, _ = function(**leaves, scale=0.3)
    weights = torch.randn_like(o)
    (got,) = torch.autograd.grad(o, [leaves["g"]], weights)
    assert not got[:, 20:].any()
    first = {name: one[:, :20] if name != "initial_state" else one for name, one in leaves.items()}
    o, _ = function(**first, scale=0.3)
    (want,) = torch.autograd.grad(o, [leaves["g"]], weights[:, :20])
    torch.testing.assert_close(got[:, :20], want[:, :20], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of", [("o",), ("state",)], ids=str)
def test_gradients_of_one_result(of, device):
    check(inputs(torch.float32, device, tokens=33), of=of)


def test_ungated_with_beta_of_columns(device):
    check(inputs(torch.float32, device, tokens=70, gate=False))
    check(inputs(torch.bfloat16, device, tokens=40, gate=False, vector=True), l2norm=True)


def test_gates_of_rows(device):
    check(inputs(torch.float32, device, tokens=40, row_gate=True))
    check(inputs(torch.float16, device, tokens=20, row_gate=True, key_dim=128, value_dim=150), l2norm=True)


def test_packed_sequences(device):
    lengths = [0, 5, 1, 33, 0, 20, 3]
    check(inputs(torch.float32, device, batch=1, tokens=sum(lengths), sequences=len(lengths)), lengths=lengths)


def test_gradient_of_each_argument(device):
    given = inputs(torch.float32, device, tokens=9)
    for name in given:
        leaves = {n: one.clone().requires_grad_(n == name) for n, one in given.items()}
        o, state = run(leaves)
        (grad,) = torch.autograd.grad((o * torch.randn_like(o)).sum() + state.square().sum(), [leaves[name]])
        assert grad.abs().max() > 0


def test_the_same_bits(device, dtype):
    given = {name: one.requires_grad_() for name, one in inputs(dtype, device).items()}
    o, state = run(given)
    grads = torch.randn_like(o), torch.randn_like(state)
    first, again = (torch.autograd.grad((o, state), list(given.values()), grads, retain_graph=True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("form", ["scalar", "rows", "columns"])
def test_finite_differences(form):
    """Use float64, which shares its source with every other dtype."""
    shape = dict(batch=1, tokens=7, heads=1, value_heads=2, key_dim=3, value_dim=5)
    given = inputs(
        torch.float64, "cpu", **shape, gate=form == "scalar", row_gate=form == "rows", vector=form == "columns"
    )
    leaves = [one.requires_grad_() for one in given.values()]
    offsets = torch.tensor([0, 2, 2, 7])
    given["initial_state"] = torch.randn(3, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    leaves[list(given).index("initial_state")] = given["initial_state"]

    def function(*tensors):
        return run(dict(zip(given, tensors, strict=True)), scale=0.7, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)

    # Finite differences cannot resolve resets, and a step from 0 would exceed 0, which is an error.
    with torch.no_grad():
        for gate in given.keys() & {"g", "gk"}:
            given[gate].clamp_(min=-0.5, max=-1e-3)
    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-8, rtol=1e-6, nondet_tol=0)


def test_no_second_derivative(device):
    given = {name: one.requires_grad_() for name, one in inputs(torch.float32, device, tokens=3).items()}
    o, _ = run(given)
    (grad,) = torch.autograd.grad(o.sum(), [given["q"]], create_graph=True)
    with pytest.raises(GradientError, match="second derivatives"):
        grad.sum().backward()


def test_gates_in_torch_have_gradients(device):
    given = inputs(torch.float32, device, tokens=9, gate=False)
    a_log = torch.zeros(6, device=device, requires_grad=True)
    dt_bias = torch.zeros(6, device=device, requires_grad=True)
    o, _ = delta_rule.fused_recurrent_gated_delta_rule(
        **given, g=torch.randn_like(given["beta"]), use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias
    )
    assert all(one.abs().min() > 0 for one in torch.autograd.grad(o.square().sum(), (a_log, dt_bias)))
