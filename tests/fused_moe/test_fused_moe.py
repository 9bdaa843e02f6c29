"""Routing, rows of experts, activation and the sum over experts, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.errors import GradientError
from flashinfer.fused_moe import ActivationType, RoutingMethodType, fused_topk_deepseek, operators, route

from ..conftest import no_synchronisation
from ..support.oracle import rounding

Method = RoutingMethodType
SOFTMAX = {Method.Default, Method.Renormalize, Method.RenormalizeNaive}
SIGMOID = {Method.DeepSeekV3, Method.SigmoidRenorm, Method.MiniMax2, Method.Sigmoid}
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def scores_of(logits: torch.Tensor, method: Method) -> torch.Tensor:
    wide = logits.cpu().double().nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if method in SOFTMAX:
        return wide.softmax(-1)
    return wide.sigmoid() if method in SIGMOID | {Method.Llama4, Method.TopKSigmoid} else wide


def check_route(logits, weights, ids, method, bias=None, groups=1, kept=1, factor=1.0) -> None:
    """Check that experts are the best in order, up to ties within 1e-6, and that weights are theirs."""
    scores, ids = scores_of(logits, method), ids.cpu().long()
    choice = scores if bias is not None or groups > 1 else logits.cpu().double()
    choice = choice if bias is None else choice + bias.cpu().double()
    tokens, top_k = ids.shape
    if groups > 1:
        each = choice.view(tokens, groups, -1)
        two = 2 if method in SIGMOID and each.shape[-1] > 1 else 1
        of_group = each.topk(two, -1).values.sum(-1)
        mine = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, ids // each.shape[-1], True)
        least = of_group.topk(kept, -1).values[:, -1:]
        assert (of_group[mine] >= (least - 1e-6).expand_as(of_group)[mine]).all() and (mine.sum(1) <= kept).all()
        rows = (of_group - least).abs().sort(1).values[:, 1] > 2e-6  # no other group is as good as the last
        choice = torch.where((of_group >= least)[..., None], each, -torch.inf).flatten(1)
    else:
        rows = torch.ones(tokens, dtype=torch.bool)
    got = choice.gather(1, ids)
    want = choice.topk(top_k, -1).values
    assert ((got - want).abs()[rows] <= 1e-6 * (1 + want.abs()[rows])).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())
    expected = scores.gather(1, ids)
    if method in SOFTMAX - {Method.Default} or method in SIGMOID - {Method.Sigmoid}:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-20)
    expected = expected * factor
    assert ((weights.cpu().double() - expected).abs() <= 4e-6 * expected.abs() + 1e-12).all()


@pytest.mark.parametrize("method", [one for one in Method if one != Method.Unspecified], ids=lambda method: method.name)
def test_methods(method, device, dtype):
    for tokens, experts, top_k in ((5, 1, 1), (33, 64, 6), (17, 160, 8), (9, 300, 10), (3, 1500, 32)):
        logits = torch.randn(tokens, experts + 3, device=device).to(dtype)[:, :experts]
        bias = torch.randn(experts, device=device) * 0.2 if method in (Method.DeepSeekV3, Method.MiniMax2) else None
        weights, ids = route(logits, top_k, method, bias=bias, routed_scaling_factor=1.5)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int32
        check_route(logits, weights, ids, method, bias, factor=1.5)
        again = route(logits, top_k, method, bias=bias, routed_scaling_factor=1.5)
        assert again[0].equal(weights) and again[1].equal(ids)
        alone = route(logits[1:2], top_k, method, bias=bias, routed_scaling_factor=1.5)
        assert alone[0].equal(weights[1:2]) and alone[1].equal(ids[1:2])


@pytest.mark.parametrize("method", [Method.DeepSeekV3, Method.Default], ids=lambda method: method.name)
@pytest.mark.parametrize(
    "experts, groups, kept, top_k", [(256, 8, 4, 8), (160, 8, 3, 6), (12, 6, 2, 3), (640, 32, 5, 9)]
)
def test_groups(method, experts, groups, kept, top_k, device):
    logits = torch.randn(50, experts, device=device)
    bias = torch.randn(experts, device=device) * 0.1 if method == Method.DeepSeekV3 else None
    weights, ids = route(logits, top_k, method, bias=bias, n_group=groups, topk_group=kept, routed_scaling_factor=2.5)
    check_route(logits, weights, ids, method, bias, groups, kept, 2.5)
    if bias is None:
        return
    values = torch.full((50, top_k), 77.0, device=device)
    indices, replay = (torch.full((50, top_k), 77, device=device, dtype=one) for one in (torch.int64, torch.int16))
    fused_topk_deepseek(logits, bias, groups, kept, top_k, 2.5, values, indices, routing_replay_out=replay)
    assert values.equal(weights) and indices.int().equal(ids) and replay.int().equal(ids)


@pytest.mark.parametrize("replay_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_fused_topk_deepseek_writes_scores_dtype_and_the_first_rows_of_a_longer_replay(replay_dtype, device, dtype):
    logits, bias = torch.randn(9, 160, device=device).to(dtype), torch.randn(160, device=device)
    weights, ids = route(logits, 6, Method.DeepSeekV3, bias=bias, n_group=8, topk_group=3, routed_scaling_factor=2.5)
    for values_dtype in {dtype, torch.float32}:
        values = torch.full((11, 9), 77.0, device=device, dtype=values_dtype)
        indices, replay = (
            torch.full((n, 6), 77, device=device).to(one) for n, one in ((9, torch.int32), (20, replay_dtype))
        )
        inner = values[1:-1, 2:-1]
        fused_topk_deepseek(logits, bias, 8, 3, 6, 2.5, inner, indices, routing_replay_out=replay)
        assert inner.equal(weights.to(values_dtype)) and indices.equal(ids)
        inner.fill_(77)
        assert (values == 77).all() and replay[:9].int().equal(ids) and (replay[9:] == 77).all()


def test_fused_topk_deepseek_refuses_buffers_before_it_writes(device):
    scores, bias = torch.randn(4, 200, device=device).half(), torch.zeros(200, device=device)

    def refused(kind, text, **other):
        given = dict(
            topk_values=torch.full((4, 3), 77.0, device=device), topk_indices=torch.full((4, 3), 77, device=device),
            routing_replay_out=torch.full((4, 3), 77, device=device),
        )  # fmt: skip
        given |= other
        before = {name: one.clone() for name, one in given.items()}
        with pytest.raises(kind, match=f"fused_topk_deepseek: {text}"):
            fused_topk_deepseek(scores, bias, 1, 1, 3, 1.0, **given)
        assert all(one.equal(before[name]) for name, one in given.items())

    integers = torch.zeros(4, 3, dtype=torch.int64, device=device)
    refused(TypeError, "routing_replay_out: got torch.float32", routing_replay_out=integers.float())
    refused(TypeError, "routing_replay_out: got torch.uint8", routing_replay_out=integers.byte())
    refused(
        TypeError, "routing_replay_out: got torch.int8, wanted integers up to 199", routing_replay_out=integers.char()
    )
    refused(ValueError, "routing_replay_out: got 3 rows, wanted at least 4", routing_replay_out=integers[:3])
    refused(ValueError, r"routing_replay_out: got shape \[4, 2\], wanted \[4, 3\]", routing_replay_out=integers[:, :2])
    refused(ValueError, "routing_replay_out: got 1 dimensions", routing_replay_out=integers[0])
    refused(TypeError, "topk_values: got torch.bfloat16", topk_values=integers.bfloat16())
    refused(TypeError, "topk_indices: got torch.int16", topk_indices=integers.short())
    refused(ValueError, r"topk_values: got shape \[4, 2\], wanted \[4, 3\]", topk_values=integers[:, :2].float())


@pytest.mark.parametrize("experts", [48, 700])
def test_ties_go_to_the_smaller_number(experts, device):
    logits = torch.randint(-2, 2, (40, experts), device=device).float()
    logits[0] = 0.0
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :7].int()
    for method in (Method.Default, Method.Renormalize, Method.TopK, Method.Sigmoid):
        assert route(logits, 7, method)[1].equal(order)
    zeros = torch.zeros(experts, device=device)
    assert route(logits, 7, Method.DeepSeekV3, bias=zeros)[1].equal(order)
    even = torch.zeros(4, experts, device=device)
    ids = route(even, 5, Method.DeepSeekV3, n_group=4, topk_group=2)[1]
    assert ids.equal(torch.arange(5, device=device).int().expand(4, 5))


@pytest.mark.parametrize("experts", [20, 600])
def test_experts_that_cannot_be_chosen(experts, device):
    logits = torch.full((4, experts), -torch.inf, device=device)
    logits[1, 7], logits[2, 3], logits[2, 11] = 1.0, torch.nan, -2.0
    logits[3] = torch.randn(experts)
    logits[3, 5] = torch.inf
    weights, ids = route(logits, 3, Method.Renormalize)
    assert ids[0].tolist() == [-1, -1, -1] and not weights[0].any()
    assert ids[1].tolist() == [7, -1, -1] and weights[1].tolist() == [1, 0, 0]
    assert ids[2].tolist() == [11, -1, -1] and weights[2].tolist() == [1, 0, 0]
    assert ids[3, 0] == 5 and weights[3].tolist() == [1, 0, 0]
    bias = torch.zeros(experts, device=device)
    bias[7] = torch.nan
    assert route(logits, 3, Method.DeepSeekV3, bias=bias)[1][1].tolist() == [-1, -1, -1]
    assert route(logits[:, :2], 3)[1][3].tolist()[2] == -1
    assert route(logits[:0], 3)[0].shape == (0, 3)


@pytest.mark.parametrize("tokens, top_k", [(0, 2), (1, 1), (3, 8), (130, 6), (700, 8), (4097, 2)])
def test_rows_of_experts(tokens, top_k, device):
    for experts, first, every in ((1, 0, 1), (8, 0, 8), (4, 8, 16), (256, 0, 256), (300, 100, 512)):
        ids = torch.randint(-1 if every > 8 else 0, every, (tokens, top_k), device=device)
        if experts == 8:
            ids[:] = 3
        for wide in (False, True):
            with no_synchronisation(device):
                bounds, token_of, rows = operators.sort(ids if wide else ids.int(), experts, first)
            local = ids.flatten() - first
            local = torch.where((local >= 0) & (local < experts), local, experts)
            order = local.sort(stable=True)
            counts = torch.bincount(local, minlength=experts + 1)[:experts]
            assert bounds.tolist() == [0, *counts.cumsum(0).tolist()]
            assert token_of.equal((order.indices // top_k).int())
            want = torch.empty_like(local).scatter_(0, order.indices, torch.arange(len(local), device=device))
            assert rows.flatten().equal(torch.where(local < experts, want, -1).int())


def activated(h: torch.Tensor, act: ActivationType, alpha=1.0, beta=0.0, limit=torch.inf) -> torch.Tensor:
    """Return the activation in float64; ``alpha`` and ``beta`` of Situ bound its gate and its linear half."""
    h = h.double()
    if act == ActivationType.SwigluStep:
        up, gate = h.chunk(2, -1)
        limit = torch.as_tensor(7.0 if isinstance(limit, float) and limit == torch.inf else limit)
        return torch.minimum(gate * gate.sigmoid(), limit) * up.clamp(-limit, limit)
    if act == ActivationType.Situ:
        up, gate = h.chunk(2, -1)
        alpha, beta = (alpha, beta) if isinstance(alpha, torch.Tensor) else (4.0, 25.0)
        return alpha * (gate / alpha).tanh() * gate.sigmoid() * beta * (up / beta).tanh()
    functional = torch.nn.functional
    if act in (ActivationType.Swiglu, ActivationType.SwigluBias):
        up, gate = h.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + beta
        return gate * torch.sigmoid(alpha * gate) * up
    if act in (ActivationType.Geglu, ActivationType.GegluTanh):
        up, gate = h.chunk(2, -1)
        return functional.gelu(gate, approximate="none" if act == ActivationType.Geglu else "tanh") * up
    plain = {
        ActivationType.Gelu: functional.gelu, ActivationType.Relu: functional.relu, ActivationType.Silu: functional.silu,
        ActivationType.Relu2: lambda x: x.relu() ** 2, ActivationType.Identity: lambda x: x,
    }  # fmt: skip
    return plain[act](h)


KERNELS = [act for act in ActivationType if act.name not in ("ClampedRelu2", "InvalidType")]


@pytest.mark.parametrize("act", KERNELS, ids=lambda act: act.name)
def test_activation(act, device, dtype):
    for rows, size in ((1, 8), (37, 200), (5, 1023)):
        gated = act in operators.GATED
        h = (torch.randn(rows, size * (2 if gated else 1) + 8, device=device) * 3).to(dtype)[:, :-8]
        h[0, :4] = torch.tensor([-200, -50, 50, 200]).to(h)
        want = activated(h.cpu(), act)
        got, none = operators.activate(h, None, int(act), False, None, None, None, None, None, False)
        assert got.dtype == dtype and none.numel() == 0
        # A cancellation such as 1 + erf(x) has float32's rounding, and so has its product with the linear half.
        most = (h.cpu().double().unflatten(-1, (-1, size)).abs()).prod(-2)
        bound = (1.01 * ROUNDING[dtype] + 3e-6) * want.abs() + 2e-5 + 2**-22 * most
        assert ((got.cpu().double() - want).abs() <= bound).all()


@pytest.mark.parametrize("size", [128, 200, 384, 31])
def test_activation_of_experts_and_eight_bits(size, device, dtype):
    counts, experts = [3, 0, 9, 1], 4
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
    h, bias = torch.randn(20, 2 * size, device=device).to(dtype), torch.randn(experts, 2 * size, device=device)
    alpha, beta, limit = (torch.rand(experts, device=device) + 0.5 for _ in range(3))
    h[13:] = torch.nan  # rows of no expert are not read
    of_row = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    numbers = [one.cpu().double()[of_row][:, None] for one in (alpha, beta, limit)]
    want = activated(h[:13].cpu().double() + bias.cpu().double()[of_row], ActivationType.Swiglu, *numbers)
    given = (h, bounds, 3, False, bias, alpha, beta, limit)
    twenty = torch.tensor(20.0, device=device)
    with no_synchronisation(device):
        plain, _ = operators.activate(*given, None, False)
        one_scale, _ = operators.activate(*given, twenty, False)
        quantised, scales = operators.activate(*given, None, True)
    assert ((plain[:13].cpu().double() - want).abs() <= 1.01 * ROUNDING[dtype] * want.abs() + 1e-5).all()
    halves = h.view(20, 2, size).flip(1).flatten(1), bounds, 3, True, bias.view(4, 2, size).flip(1).flatten(1)
    assert operators.activate(*halves, alpha, beta, limit, None, False)[0][:13].equal(plain[:13])
    step = 2**-3  # of a number of four bits, relative; half of it, and the least number
    assert one_scale.dtype == quantised.dtype == torch.float8_e4m3fn
    got = one_scale[:13].cpu().double() / 20
    clipped = want.clamp(-448 / 20, 448 / 20)
    assert ((got - clipped).abs() <= step / 2 * 1.01 * clipped.abs() + 2**-9 / 20).all()
    blocks = (size + 127) // 128
    assert scales.shape == (20, blocks)
    for block in range(blocks):
        part = slice(128 * block, min(size, 128 * block + 128))
        most = want[:, part].abs().amax(1)
        scale = scales[:13, block].cpu().double()
        assert ((scale - most / 448).abs() <= 2e-5 * most / 448 + 1e-7).all()
        got = quantised[:13, part].cpu().double() * scale[:, None]
        assert (
            (got - want[:, part]).abs() <= step / 2 * 1.01 * want[:, part].abs() + 2**-9 * scale[:, None] + 1e-5
        ).all()


def test_blocks_of_numbers_whose_reciprocals_are_infinite_or_that_have_no_number(device):
    """Keep zeros next to tiny numbers, and NaN without its block."""
    h = torch.randn(3, 384, device=device)
    h[0, :128] = 1e-37 * torch.rand(128, device=device)
    h[1, :128] = 3e-39
    h[:2, :128:3] = 0
    h[2, 130] = torch.nan
    quantised, scales = operators.activate(h, None, int(ActivationType.Identity), False, *[None] * 5, True)
    got = quantised.double().unflatten(1, (3, 128)) * scales.double()[..., None]
    assert got[2, 1, 2].isnan() and scales.isfinite().all()
    got[2, 1, 2], h[2, 130] = 0, 0
    want = h.double().unflatten(1, (3, 128))
    assert ((got - want).abs() <= want.abs() / 16 * 1.01 + 2**-9 * scales.double()[..., None]).all()


@pytest.mark.parametrize("size", [64, 37])
def test_the_sum_over_experts(size, device, dtype):
    tokens, top_k, bounds = 9, 4, torch.tensor([0, 12, 12, 30], dtype=torch.int32, device=device)
    y = torch.randn(tokens * top_k, size, device=device).to(dtype)
    y[30:] = torch.nan
    rows = torch.randperm(36, device=device)
    rows = torch.where(rows < 30, rows, -1).int().view(tokens, top_k)
    weights, bias = torch.rand(tokens, top_k, device=device), torch.randn(3, size, device=device)
    weights[0] *= 2**-14  # results are subnormal in float16
    expert = (rows >= 12).long() * 2
    terms = y.nan_to_num().double()[rows.clamp(min=0).long()]
    for out_dtype in (torch.float32, torch.bfloat16, dtype):
        for given in ((weights, bias), (None, None)):
            out = torch.full((tokens + 2, size), 77.0, device=device, dtype=out_dtype)
            operators.finalize(out[1:-1], y, rows, given[0], given[1], bounds)
            one = terms + (bias.double()[expert] if given[1] is not None else 0)
            one = one * (given[0].double()[..., None] if given[0] is not None else 1) * (rows >= 0)[..., None]
            want, most = one.sum(1), one.abs().sum(1)
            # 2**-20 is sixteen roundings of float32: each term has four and each sum three.
            assert ((out[1:-1].double() - want).abs() <= rounding(want, out_dtype) + 2**-20 * most).all()
            assert (out[[0, -1]] == 77).all()


def test_invalid_arguments(device):
    logits = torch.randn(4, 12, device=device)
    for text, call in {
        "top_k: got 33": lambda: route(logits, 33),
        "n_group: got 5": lambda: route(logits, 2, n_group=5),
        "topk_group: got 3": lambda: route(logits, 2, n_group=2, topk_group=3),
        "method: got 10": lambda: route(logits, 2, Method.Unspecified),
        "bias: got shape": lambda: route(logits, 2, bias=logits[0, :3]),
        "last dimension": lambda: route(logits[:, ::2], 2),
        "num_experts: got 0": lambda: operators.sort(logits.int(), 0, 0),
        "input: got 5 columns": lambda: operators.activate(logits[:, :5], None, 3, False, *[None] * 5, False),
        "activation: got 11": lambda: operators.activate(logits, None, 11, False, *[None] * 5, False),
        "m_indptr: got None": lambda: operators.activate(logits, None, 3, False, logits, *[None] * 4, False),
        "wanted Swiglu or Situ": lambda: operators.activate(
            logits, torch.zeros(2, device=device).int(), 4, False, None, logits[0, :1], *[None] * 3, False
        ),
        "wanted Swiglu or SwigluStep": lambda: operators.activate(
            logits, torch.zeros(2, device=device).int(), 10, False, None, None, None, logits[0, :1], None, False
        ),
        "input: got 4 rows, wanted 8": lambda: operators.finalize(
            logits[:2].clone(), logits, torch.zeros(2, 4, device=device).int(), None, None, None
        ),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="logits: got int32"):
        route(logits.int(), 2)
    with pytest.raises(GradientError, match="has no gradient"):
        route(logits.clone().requires_grad_(), 2)
