"""Mamba's step against float64: tokens, states, slots, speculation, stochastic rounding, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError
from flashinfer.mamba import selective_state_update

# Half a unit in the last place of each type.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
SENTINEL = 77.0


def inputs(
    device: str, dtype: torch.dtype, tokens: tuple[int, ...], heads: int = 6, dim: int = 33, size: int = 24,
    groups: int = 2, one_decay: bool = True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return inputs with leading dimensions ``tokens``. x, B and C are slices of one projection, as in models."""
    width = heads * dim + 2 * groups * size
    fused = torch.randn(*tokens, width + 7, device=device).to(dtype)[..., :width]
    x, b, c = fused.split((heads * dim, groups * size, groups * size), -1)
    last = (1, 1) if one_decay else (dim, size)
    return dict(
        x=x.unflatten(-1, (heads, dim)),
        dt=torch.randn(*tokens, heads, last[0], device=device).to(dtype).expand(*tokens, heads, dim),
        A=-torch.exp(torch.randn(heads, *last, device=device)).expand(heads, dim, size),
        B=b.unflatten(-1, (groups, size)),
        C=c.unflatten(-1, (groups, size)),
        D=torch.randn(heads, last[0], device=device).to(dtype).expand(heads, dim),
        dt_bias=torch.randn(heads, last[0], device=device).to(dtype).expand(heads, dim),
    )


def oracle(state: torch.Tensor, given: dict[str, Any], z: torch.Tensor | None, softplus: bool):
    """Outputs, the size of their terms, and the states after each of T tokens, in float64; x is [B, T, H, P].

    What a state is the sum of may cancel, too: its errors are those of the terms.
    """
    g = {name: one.detach().cpu().double() for name, one in given.items()}
    heads, state, outs, sizes, states = g["x"].shape[2], state.detach().cpu().double(), [], [], []
    terms_of_state = state.abs()
    for t in range(g["x"].shape[1]):
        x, dt = g["x"][:, t], g["dt"][:, t] + g.get("dt_bias", torch.zeros(()).double())
        b, c = (g[name][:, t].repeat_interleave(heads // g[name].shape[2], 1) for name in ("B", "C"))
        step = torch.nn.functional.softplus(dt) if softplus else dt
        decay, added = torch.exp(step[..., None] * g["A"]), (step * x)[..., None] * b[:, :, None]
        state, terms_of_state = state * decay + added, terms_of_state * decay + added.abs()
        terms, skip = state * c[:, :, None], g["D"] * x if "D" in g else x * 0
        gate = torch.nn.functional.silu(z[:, t].cpu().double()) if z is not None else torch.ones_like(x)
        outs.append((terms.sum(-1) + skip) * gate)
        sizes.append(((terms_of_state * c[:, :, None].abs()).sum(-1) + skip.abs()) * gate.abs())
        states.append(state)
    return torch.stack(outs, 1), torch.stack(sizes, 1), torch.stack(states, 1)


def check(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | None = None) -> None:
    size = want.abs() if size is None else size
    bound = 1.01 * ROUNDING[got.dtype] * want.abs() + 2e-5 * size + 1e-6
    assert ((got.cpu().double() - want).abs() <= bound).all()


def pool(device: str, slots: int, state_dtype: torch.dtype, heads: int = 6, dim: int = 33, size: int = 24):
    """Slots of which each is contiguous, with something of another's between them, and all of the memory."""
    each = heads * dim * size
    memory = (8 * torch.randn(slots, each + 16, device=device)).to(state_dtype)
    return memory[:, :each].unflatten(1, (heads, dim, size)), memory


@pytest.mark.parametrize("size", [1, 16, 24, 128, 200, 256])
def test_one_token(size, device, dtype):
    for state_dtype in ROUNDING:
        given = inputs(device, dtype, (4,), size=size)
        z = torch.randn(4, 6, 33, device=device).to(dtype)
        state, memory = pool(device, 7, state_dtype, size=size)
        before = memory.clone()
        slots = torch.tensor([5, -1, 0, 7], device=device)  # one that is padding, and one that the pool does not have
        first = state.clone()[[5, 1, 0, 2]]
        out = torch.full((4, 6, 33), SENTINEL, device=device, dtype=dtype)
        result = selective_state_update(
            state, **given, z=z, dt_softplus=True, state_batch_indices=slots, out=out
        )  # fmt: skip
        assert result is out
        first[[1, 3]] = 0  # padding starts from zeros
        one = {name: t if name in ("A", "D", "dt_bias") else t[:, None] for name, t in given.items()}
        want, terms, states = oracle(first, one, z[:, None], True)
        check(out, want[:, 0], terms[:, 0])
        for row, slot in ((0, 5), (2, 0)):
            check(state[slot], states[row, 0], states[row, 0].abs() + 1)
        before[[5, 0], : state[0].numel()] = memory[[5, 0], : state[0].numel()]
        assert before.equal(memory)


@pytest.mark.parametrize("one_decay", [True, False])
def test_several_tokens_and_the_states_between_them(one_decay, device, dtype):
    given = inputs(device, dtype, (3, 5), one_decay=one_decay)
    del given["D"], given["dt_bias"]
    given["dt"] = given["dt"].abs() * 0.3
    state, _ = pool(device, 4, torch.float32)
    buffer = torch.full((4, 6, 6, 33, 24), SENTINEL, device=device)
    to, slots = (torch.tensor(n, device=device, dtype=torch.int32) for n in ([2, 0, 3], [1, 3, 0]))
    first = state.clone()
    out = selective_state_update(
        state, **given, state_batch_indices=slots, disable_state_update=True, intermediate_states_buffer=buffer,
        intermediate_state_indices=to, cache_steps=6,
    )  # fmt: skip
    assert state.equal(first)
    want, terms, states = oracle(first[slots.long()], given, None, False)
    check(out, want, terms)
    check(buffer[to.long()][:, :5], states, states.abs() + 1)
    assert (buffer[to.long()][:, 5] == SENTINEL).all() and (buffer[1] == SENTINEL).all()
    last = torch.tensor([1, 2, 0], device=device)
    again = selective_state_update(state, **given, state_batch_indices=slots, dst_state_batch_indices=last)
    assert again.equal(out) and state[3].equal(first[3])
    check(state[last], states[:, -1], states[:, -1].abs() + 1)


def test_sequences_of_other_lengths_and_speculation(device):
    lengths = [3, 0, 1, 4]
    given = inputs(device, torch.bfloat16, (8,), dim=16, size=128)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device, dtype=torch.int32)
    state, _ = pool(device, 20, torch.float32, dim=16, size=128)
    first = state.clone()
    slots = torch.randperm(19, device=device)[:16].view(4, 4) + 1  # slot 0 is padding
    slots[3, 3] = 0
    accepted = torch.tensor([2, 1, 4, 0], device=device)
    out = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=slots, cu_seqlens=offsets, num_accepted_tokens=accepted,
        pad_slot_id=0, cache_steps=4,
    )  # fmt: skip
    touched = set()
    for n, length in enumerate(lengths):
        begin, start = int(offsets[n]), int(slots[n, max(int(accepted[n]) - 1, 0)])
        shared = ("A", "D", "dt_bias")
        one = {k: t if k in shared else t[None, begin : begin + length] for k, t in given.items()}
        if length == 0:
            continue
        want, terms, states = oracle(first[start][None], one, None, True)
        check(out[begin : begin + length], want[0], terms[0])
        for t in range(length):
            if slots[n, t] != 0:
                check(state[slots[n, t]], states[0, t], states[0, t].abs() + 1)
                touched.add(int(slots[n, t]))
    others = [slot for slot in range(20) if slot not in touched]
    assert state[others].equal(first[others])
    # Without numbers of accepted tokens the last state goes to the first column.
    state.copy_(first)
    again = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=slots[:, :1], cu_seqlens=offsets, pad_slot_id=0
    )
    alone = {k: t if k in shared else t[None, :3] for k, t in given.items()}
    want, terms, states = oracle(first[slots[:1, 0]], alone, None, True)
    check(again[:3], want[0], terms[0])
    check(state[slots[0, 0]], states[0, -1], states[0, -1].abs() + 1)


def test_padding_among_several_tokens(device):
    """Padding starts from zeros, and writes neither a state nor a state between tokens."""
    given = inputs(device, torch.bfloat16, (4, 3), size=128)
    state, memory = pool(device, 6, torch.bfloat16, size=128)
    before, first = memory.clone(), state.clone()[[1, 0, 2, 0]]
    first[[1, 3]] = 0
    buffer = torch.full((4, 3, 6, 33, 128), SENTINEL, device=device, dtype=torch.bfloat16)
    slots, to = torch.tensor([1, 99, 2, -5], device=device), torch.tensor([3, 2, 1, 0], device=device)
    out = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=slots, pad_slot_id=99,
        intermediate_states_buffer=buffer, intermediate_state_indices=to,
    )  # fmt: skip
    want, terms, states = oracle(first, given, None, True)
    check(out, want, terms)
    check(buffer[[3, 1]], states[[0, 2]], states[[0, 2]].abs() + 1)
    assert (buffer[[0, 2]] == SENTINEL).all()
    check(state[[1, 2]], states[[0, 2], -1], states[[0, 2], -1].abs() + 1)
    before[[1, 2], : state[0].numel()] = memory[[1, 2], : state[0].numel()]
    assert before.equal(memory)


def quantized(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = state.abs().amax(-1, keepdim=True) / 32767
    return torch.round(state / scale.where(scale > 0, 1)).to(torch.int16), scale.float()


def check_integers(integers: torch.Tensor, scale: torch.Tensor, want: torch.Tensor) -> None:
    """Check a state of integers: the largest of a row is 32767, and each is half a step off at most."""
    largest, got = want.abs().amax(-1), integers.cpu().double() * scale.cpu().double()[..., None]
    assert ((scale.cpu().double() - largest / 32767).abs() <= 1e-5 * largest / 32767 + 2e-9).all()
    assert (integers.cpu().int().abs().amax(-1) == 32767).logical_or(largest == 0).all()
    assert ((got - want).abs() <= (0.51 / 32767 + 2e-5) * (largest[..., None] + 1)).all()


@pytest.mark.parametrize("one_decay", [True, False])
@pytest.mark.parametrize("size", [1, 24, 64, 128, 200, 256])
def test_states_of_integers_with_scales(size, one_decay, device, dtype):
    given = inputs(device, dtype, (3, 2), size=size, one_decay=one_decay)
    state, memory = pool(device, 5, torch.int16, size=size)
    integers, scales = quantized(torch.randn(5, 6, 33, size, device=device))
    integers[2, 1], scales[2, 1] = 0, 1
    state.copy_(integers)
    spaced = torch.full((5, 6, 33, 3), SENTINEL, device=device)[..., 1:2].copy_(scales)
    buffer = torch.full((3, 3, 6, 33, size), 7, device=device, dtype=torch.int16)
    buffer_scales = torch.full((3, 3, 6, 33), SENTINEL, device=device)
    slots, to = torch.tensor([4, 2, -1], device=device), torch.tensor([1, 0, 2], device=device)
    first = (integers.double() * scales.double())[slots]
    first[2] = 0
    before, rest = memory.clone(), dict(dt_softplus=True, state_batch_indices=slots)
    out = selective_state_update(
        state, **given, **rest, state_scale=spaced, disable_state_update=True, intermediate_states_buffer=buffer,
        intermediate_state_indices=to, intermediate_state_scales=buffer_scales,
    )  # fmt: skip
    want, terms, states = oracle(first, given, None, True)
    check(out, want, terms)
    assert memory.equal(before) and spaced.equal(scales)
    check_integers(buffer[[1, 0], :2], buffer_scales[[1, 0], :2], states[:2])
    assert (buffer[:2, 2] == 7).all() and (buffer_scales[:2, 2] == SENTINEL).all()
    assert (buffer[2] == 7).all() and (buffer_scales[2] == SENTINEL).all()
    again = selective_state_update(state, **given, **rest, state_scale=spaced.squeeze(-1))
    assert again.equal(out)
    check_integers(state[slots[:2]], spaced[slots[:2], ..., 0], states[:2, -1])
    others = [0, 1, 3]
    assert state[others].equal(integers[others]) and spaced[others].equal(scales[others])


def test_rows_of_integers_without_a_usable_scale(device):
    """Tiny rows become zeros. Rows that are not finite stay so."""
    state, scale = torch.zeros(3, 1, 2, 8, dtype=torch.int16, device=device), torch.ones(3, 1, 2, device=device)
    x = torch.tensor([[1e-32, 0.0], [float("inf"), 1.0], [float("nan"), 2.0]], device=device).view(3, 1, 2)
    ones = torch.ones(3, 1, 8, device=device)
    selective_state_update(
        state, x, torch.ones_like(x), -torch.ones(1, 2, 8, device=device), ones, ones, state_scale=scale
    )
    assert not state[0].any() and scale[0].eq(1).all()
    got = state.cpu().float() * scale.cpu()[..., None]
    assert got[1:, 0, 0].isnan().all()
    assert ((got[1:, 0, 1] - torch.tensor([[1.0], [2.0]])).abs() < 1e-4).all()


def test_a_state_without_heads_is_mamba_1(device, dtype):
    given = inputs(device, dtype, (3,), heads=1, dim=40, size=16, groups=1, one_decay=False)
    flat = {name: t.squeeze(0 if name in ("A", "D", "dt_bias") else 1) for name, t in given.items()}
    state = torch.randn(3, 40, 16, device=device)
    other = state.clone()
    out = selective_state_update(state, **flat, dt_softplus=True)
    assert out.equal(selective_state_update(other[:, None], **given, dt_softplus=True)[:, 0]) and state.equal(other)


@pytest.mark.parametrize("one_decay", [True, False])
@pytest.mark.parametrize("size", [8, 16, 64, 104, 128, 200, 256])
def test_rows_that_are_read_by_vectors(size, one_decay, device, dtype):
    """Against float64; and with B and C where vectors cannot be read, the same states, also rounded at random."""
    given = inputs(device, dtype, (3,), size=size, one_decay=one_decay)
    shifted = dict(given)
    for name in ("B", "C"):
        given[name] = given[name].contiguous()
        memory = torch.empty(given[name].numel() + 1, device=device, dtype=dtype)
        shifted[name] = memory[1:].view(given[name].shape).copy_(given[name])
    one = {name: t if name in ("A", "D", "dt_bias") else t[:, None] for name, t in given.items()}
    for state_dtype in ROUNDING:
        first = torch.randn(3, 6, 33, size, device=device).to(state_dtype)
        want, terms, states = oracle(first, one, None, True)
        state, other = first.clone(), first.clone()
        check(selective_state_update(state, **given, dt_softplus=True), want[:, 0], terms[:, 0])
        check(state, states[:, 0], states[:, 0].abs() + 1)
        selective_state_update(other, **shifted, dt_softplus=True)
        assert other.equal(state)
        if state_dtype == torch.float32:
            continue
        seed = torch.tensor([5], device=device)
        for one_state, arguments in ((state, given), (other, shifted)):
            selective_state_update(one_state.copy_(first), **arguments, dt_softplus=True, rand_seed=seed)
        assert other.equal(state)


def test_stochastic_rounding(device):
    given = inputs(device, torch.float32, (2,))
    for dtype in (torch.float16, torch.bfloat16):
        first, seed = torch.randn(2, 6, 33, 24, device=device).to(dtype), torch.tensor([3], device=device)
        one = {name: t if name in ("A", "D", "dt_bias") else t[:, None] for name, t in given.items()}
        want = oracle(first, one, None, True)[2][:, 0]
        total, runs = torch.zeros(want.shape, dtype=torch.float64), 300
        for run in range(runs):
            state = first.clone()
            selective_state_update(state, **given, dt_softplus=True, rand_seed=seed + run)
            step = 2 * ROUNDING[dtype] * want.abs().clamp(min=2**-14)
            assert ((state.cpu().double() - want).abs() <= 1.001 * step + 1e-5 * want.abs() + 1e-6).all()
            total += state.cpu().double() - want
        # The mean over all elements of (state - want) / step is 0; each is in [-1, 1].
        assert abs((total / runs / step).mean()) < 5 / (want.numel() * runs) ** 0.5 + 2e-3
        same = first.clone()
        selective_state_update(same, **given, dt_softplus=True, rand_seed=seed + runs - 1)
        assert same.equal(state)
        nearest = first.clone()
        selective_state_update(nearest, **given, dt_softplus=True)
        assert not nearest.equal(state)


def test_bits_do_not_depend_on_the_batch(device):
    given = inputs(device, torch.bfloat16, (9,), dim=64, size=128)
    state = torch.randn(9, 6, 64, 128, device=device).bfloat16()
    alone = state.clone()
    out = selective_state_update(state, **given, dt_softplus=True)
    for n in range(9):
        one = {name: t if name in ("A", "D", "dt_bias") else t[n : n + 1] for name, t in given.items()}
        slot = torch.tensor([n], device=device)
        assert selective_state_update(alone, **one, dt_softplus=True, state_batch_indices=slot)[0].equal(out[n])
    assert alone.equal(state)


def test_no_tokens(device):
    given = inputs(device, torch.float32, (0,))
    state, _ = pool(device, 2, torch.float32)
    first = state.clone()
    assert selective_state_update(state, **given).shape == (0, 6, 33) and state.equal(first)


def test_invalid_arguments(device):
    given = inputs(device, torch.float32, (2,))
    state, _ = pool(device, 2, torch.float32)
    first = state.clone()
    index = torch.zeros(2, dtype=torch.int64, device=device)

    def refused(kind: type[Exception], text: str, **other: Any) -> None:
        with pytest.raises(kind, match=text):
            selective_state_update(**{"state": state, **given, **other})
        assert state.equal(first)

    refused(ValueError, "x: got 2 dimensions, wanted 3", x=given["x"][0])
    refused(ValueError, "dt: got shape", dt=given["dt"][..., :5])
    refused(ValueError, "A: got shape", A=given["A"][:, :5])
    refused(
        ValueError, "B: got .* groups, wanted a divisor", B=given["B"].repeat(1, 2, 1), C=given["C"].repeat(1, 2, 1)
    )
    refused(ValueError, "C: got shape", C=given["C"][:, :1])
    refused(TypeError, "C: got bfloat16, wanted float32", C=given["C"].bfloat16())
    refused(TypeError, "state: got .*int32", state=state.int())
    refused(ValueError, "state: is not contiguous within a slot", state=state.contiguous().mT.contiguous().mT)
    refused(ValueError, "got 300 elements in a row", **pool_of(device, 300))
    refused(ValueError, "state: got 1 slots, wanted 2", state=state[:1])
    refused(ValueError, "state_batch_indices: got 1 rows, wanted 2", state_batch_indices=index[:1])
    refused(TypeError, "state_batch_indices: got float32", state_batch_indices=index.float())
    refused(ValueError, "state_batch_indices: got None", num_accepted_tokens=index)
    refused(ValueError, "intermediate_states_buffer: got None", intermediate_state_indices=index)
    refused(TypeError, "intermediate_states_buffer: got bfloat16", intermediate_states_buffer=first[:, None].bfloat16())
    refused(ValueError, "rand_seed: got a seed, wanted None", rand_seed=index[:1])
    refused(ValueError, "philox_rounds: got 11", philox_rounds=11)
    refused(ValueError, "algorithm: got 'fast'", algorithm="fast")
    refused(ValueError, "out: got shape", out=torch.empty(2, 6, 5, device=device))
    refused(ValueError, "out: overlaps the memory of x", out=given["x"])
    refused(ValueError, "D: got bfloat16, wanted dt's", D=given["D"].bfloat16())
    scales, integers = torch.ones(2, 6, 33, device=device), torch.zeros(2, 6, 33, 24, dtype=torch.int16, device=device)
    refused(ValueError, "state_scale: got scales, wanted None for states that are not int16", state_scale=scales)
    refused(ValueError, "state_scale: got None, wanted scales for states in int16", state=integers)
    scaled = dict(state=integers, state_scale=scales)
    refused(ValueError, "state_scale: got shape", **scaled | dict(state_scale=scales[:, :5]))
    refused(ValueError, "state_scale: got 2 dimensions, wanted 3", **scaled | dict(state_scale=scales[0]))
    refused(TypeError, "state_scale: got bfloat16, wanted float32", **scaled | dict(state_scale=scales.bfloat16()))
    refused(
        ValueError,
        "state_scale: has elements that share memory",
        **scaled | dict(state_scale=scales[:1].expand(2, 6, 33)),
    )
    refused(
        ValueError, "rand_seed: got a seed, wanted None for states in float32 or int16", **scaled, rand_seed=index[:1]
    )
    history = integers[:, None].clone()
    refused(
        ValueError, "intermediate_state_scales: got None, wanted scales", **scaled, intermediate_states_buffer=history
    )
    refused(
        ValueError, "intermediate_state_scales: got scales, wanted them with intermediate_states_buffer", **scaled,
        intermediate_state_scales=scales[:, None],
    )  # fmt: skip
    refused(
        ValueError, "intermediate_state_indices: got int32, wanted that of state_batch_indices",
        intermediate_states_buffer=first[:, None].contiguous(), intermediate_state_indices=index.int(),
        state_batch_indices=index,
    )  # fmt: skip
    assert not integers.any() and not history.any() and scales.eq(1).all()
    refused(GradientError, "has no gradient", x=given["x"].clone().requires_grad_())
    refused(ValueError, "cu_seqlens: got one element, wanted at least two", cu_seqlens=index[:1])
    if device == "cpu":
        refused(ValueError, "cu_seqlens: got 3 at 1, wanted offsets from 0 to 2", cu_seqlens=torch.tensor([0, 3]))


def pool_of(device: str, size: int) -> dict[str, torch.Tensor]:
    return inputs(device, torch.float32, (2,), size=size) | {"state": pool(device, 2, torch.float32, size=size)[0]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_other_slots():
    given = inputs("cuda", torch.bfloat16, (4,), dim=64, size=128)
    state = torch.randn(9, 6, 64, 128, device="cuda")
    other, slots = state.clone(), torch.tensor([1, 2, 3, 4], device="cuda")
    out = torch.empty(4, 6, 64, device="cuda", dtype=torch.bfloat16)

    def call(pool: torch.Tensor, to: torch.Tensor | None) -> torch.Tensor:
        return selective_state_update(pool, **given, dt_softplus=True, state_batch_indices=slots, out=to)

    call(state.clone(), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(state, out)
    for new in ([8, -1, 0, 5], [1, 3, 2, 7]):
        slots.copy_(torch.tensor(new))
        graph.replay()
        assert out.equal(call(other, None)) and state.equal(other)
