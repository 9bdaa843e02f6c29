"""The causal convolution and its step against float64."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..conftest import no_synchronisation
from ..support.oracle import assert_close
from .oracle import convolve, magnitude, wide

# Units in the last place: float32 sums and the activation, and the rounding of the result.
ULPS = {torch.float32: 8.0, torch.float16: 1.0, torch.bfloat16: 1.0}
LAYOUTS = ["channels last", "channels first", "padded"]


def laid_out(layout: str, batch: int, channels: int, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """``[B, channels, T]`` with one of three kinds of strides."""
    if layout == "channels first":
        return torch.randn(batch, channels, tokens).to(device, dtype)
    wider = channels + (0 if layout == "channels last" else 9)
    return torch.randn(batch, tokens, wider).to(device, dtype)[..., :channels].transpose(1, 2)


def check(x, weight, bias, initial, activation, lengths=None) -> None:
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=x.device).cumsum(0)
    out, states = flashinfer.causal_conv1d_fn(
        x, weight, bias, initial, True, activation=activation, cu_seqlens=offsets
    )  # fmt: skip
    want, want_states = convolve(*map(wide, (x, weight, bias, initial)), activation is not None, lengths)
    terms = magnitude(x, weight, bias, initial, lengths=lengths)
    assert_close(out, want, terms, ULPS[x.dtype])
    assert torch.equal(states.double().cpu(), want_states) and states.dtype == x.dtype
    assert out.transpose(1, 2).is_contiguous()
    if offsets is not None and x.device.type == "cuda":
        with no_synchronisation(str(x.device.type)):
            flashinfer.causal_conv1d_fn(x, weight, bias, initial, cu_seqlens=offsets)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_batches(width, layout, activation, dtype, device):
    for channels, tokens in ((1, 1), (24, 2), (37, 9), (520, 130), (1032, 200), (64, 0)):
        x = laid_out(layout, random.randint(1, 3), channels, tokens, dtype, device)
        weight = torch.randn(channels, width).to(device, dtype)
        bias = torch.randn(channels).to(device, dtype) if random.random() < 0.5 else None
        initial = torch.randn(x.shape[0], channels, width - 1).to(device, dtype) if random.random() < 0.7 else None
        check(x, weight, bias, initial, activation)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_packed_sequences(width, dtype, device):
    """Lengths of 0 and of less than a state, and pieces that begin and end inside of sequences."""
    lengths = [0, 5, 1, 2, 0, 63, 3, 0, 150, 1]
    for layout in LAYOUTS:
        x = laid_out(layout, 1, 72, sum(lengths), dtype, device)
        states = torch.randn(len(lengths), width - 1, 72).to(device, dtype)
        weight, bias = torch.randn(72, width, device=device), torch.randn(72, device=device)
        check(x, weight, bias, states.transpose(1, 2), "swish", lengths)
        check(x, weight, None, None, None, lengths)


def test_a_sequence_in_pieces_is_the_sequence(device):
    x, weight = torch.randn(2, 40, 33, device=device), torch.randn(40, 4, device=device)
    want, end = flashinfer.causal_conv1d_fn(x, weight, return_final_states=True, activation="silu")
    parts, state = [], None
    for piece in x.split([1, 20, 2, 10], dim=-1):
        out, state = flashinfer.causal_conv1d_fn(piece, weight, None, state, True, activation="silu")
        parts.append(out)
    assert torch.equal(torch.cat(parts, -1), want) and torch.equal(state, end)


def test_nan_of_a_neighbour_stays_there(device):
    x, weight = torch.randn(1, 16, 9, device=device), torch.randn(16, 4, device=device)
    x[..., 4:7] = float("nan")
    out = flashinfer.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor([0, 4, 7, 9], device=device))
    assert bool(out[..., 4:7].isnan().all()) and not bool(out[..., [0, 1, 2, 3, 7, 8]].isnan().any())


def test_final_states_into_given_memory(device):
    x, weight = torch.randn(2, 24, 9, device=device), torch.randn(24, 3, device=device)
    memory = torch.full((2, 2, 24), float("nan"), device=device).transpose(1, 2)
    out = flashinfer.causal_conv1d_fn(x, weight, final_states_out=memory)
    assert out.shape == x.shape and torch.equal(memory, x[..., 7:])
    with pytest.raises(
        ValueError, match=r"causal_conv1d_fn: final_states_out: got shape \[2, 24\], wanted \[2, 24, 2\]"
    ):
        flashinfer.causal_conv1d_fn(x, weight, final_states_out=memory[..., 0])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_step(width, tokens, dtype, device):
    """Each sequence's slot changes, no other does, and the result is that of the whole sequence's last tokens."""
    for length in (width - 1, width, 7):
        count = 1 if tokens is None else tokens
        x = torch.randn(4, 72, count).to(device, dtype)
        first = random.random() < 0.5
        pool = torch.randn(6, length, 72).to(device, dtype).transpose(1, 2)
        pool = pool if first else pool.contiguous()
        weight, bias = torch.randn(72, width).to(device, dtype), torch.randn(72).to(device, dtype)
        slots = torch.tensor([4, -1, 0, 9], dtype=random.choice([torch.int32, torch.int64]), device=device)
        before = pool.clone()
        given = x[..., 0] if tokens is None else x
        out = flashinfer.causal_conv1d_update(given, pool, weight, bias, "silu", None, slots)
        assert out.shape == given.shape
        out = out.reshape(x.shape)
        for row, slot in enumerate(slots.tolist()):
            if not 0 <= slot < 6:
                assert not bool(out[row].any())
                continue
            times = torch.cat([before[slot], x[row]], -1)
            past, state = times[None, :, : times.shape[-1] - count], wide(before[slot][None, :, -(width - 1) :])
            want, _ = convolve(*map(wide, (x[row][None], weight, bias)), state, True)
            terms = magnitude(x[row][None], weight, bias, past[..., -(width - 1) :], lengths=None)
            assert_close(out[row][None], want, terms, ULPS[dtype])
            assert torch.equal(pool[slot], times[:, -length:])
        for slot in (1, 2, 3, 5):
            assert torch.equal(pool[slot], before[slot])


def test_step_of_rings(device):
    x, weight = torch.randn(3, 40, 12, device=device), torch.randn(40, 4, device=device)
    want = flashinfer.causal_conv1d_fn(x, weight)
    pool, at = torch.zeros(3, 40, 5, device=device), 0
    for piece in x.split([1, 1, 3, 2, 5], dim=-1):
        times = torch.full((3,), at, dtype=torch.int32, device=device)
        got = flashinfer.causal_conv1d_update(piece, pool, weight, cache_seqlens=times)
        at += piece.shape[-1]
        torch.testing.assert_close(got, want[..., at - piece.shape[-1] : at])
    for time in range(7, 12):
        assert torch.equal(pool[..., time % 5], x[..., time])


def test_steps_are_the_sequence_under_compile(device, cold_dynamo):
    x, weight = torch.randn(3, 40, 5, device=device), torch.randn(40, 4, device=device)
    pool = torch.zeros(3, 40, 3, device=device)
    step = torch.compile(flashinfer.causal_conv1d_update, fullgraph=True, dynamic=True, backend="aot_eager")
    got = torch.stack([step(one, pool, weight, activation="silu") for one in x.unbind(-1)], -1)
    torch.testing.assert_close(got, flashinfer.causal_conv1d_fn(x, weight, activation="silu"))


def test_steps_have_no_gradient(device):
    x, weight = torch.randn(3, 40, device=device, requires_grad=True), torch.randn(40, 4, device=device)
    pool = torch.zeros(3, 40, 3, device=device)
    with pytest.raises(GradientError, match="causal_conv1d_update: has no gradient"):
        flashinfer.causal_conv1d_update(x, pool, weight)
    assert not bool(pool.any())


X, WEIGHT = torch.ones(2, 8, 5), torch.ones(8, 4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=X[0]), ValueError, "x: got 2 dimensions, wanted 3"),
        (dict(x=[1]), TypeError, "x: got list, wanted Tensor"),
        (dict(x=X.int()), TypeError, "x: got int32, wanted float"),
        (dict(weight=torch.ones(8, 5)), ValueError, "weight: got a width of 5, wanted 2 to 4"),
        (dict(weight=torch.ones(7, 4)), ValueError, r"weight: got shape \[7, 4\], wanted \[8, any\]"),
        (dict(weight=WEIGHT.half()), TypeError, "weight: got float16, wanted float32"),
        (dict(bias=torch.ones(7)), ValueError, r"bias: got shape \[7\], wanted \[8\]"),
        (dict(bias=torch.ones(8).half()), TypeError, "bias: got float16, wanted float32"),
        (dict(initial_states=torch.ones(2, 8, 4)), ValueError, r"initial_states: got shape \[2, 8, 4\]"),
        (dict(initial_states=torch.ones(2, 8, 3).half()), TypeError, "initial_states: got float16"),
        (dict(activation="relu"), ValueError, "activation: got 'relu', wanted None, 'silu' or 'swish'"),
        (dict(cu_seqlens=torch.tensor([0, 5])), ValueError, "x: got a batch of 2, wanted 1 with cu_seqlens"),
        (dict(x=X[:1], cu_seqlens=torch.tensor([0])), ValueError, "cu_seqlens: got 1 elements, wanted at least two"),
        (dict(x=X[:1], cu_seqlens=torch.tensor([0.0, 5])), TypeError, "cu_seqlens: got float32, wanted int32 or int64"),
    ],
)
def test_bad_input(change, error, message, device):
    given = dict(x=X, weight=WEIGHT) | change
    given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    with pytest.raises(error, match=f"causal_conv1d_fn: {message}"):
        flashinfer.causal_conv1d_fn(**given)


@pytest.mark.parametrize("offsets", [[1, 5], [0, 3, 2, 5], [0, 4], [0, 6]])
def test_wrong_offsets_on_the_cpu(offsets):
    with pytest.raises(ValueError, match="cu_seqlens: got . at ., wanted offsets from 0 to 5 that do not decrease"):
        flashinfer.causal_conv1d_fn(X[:1], WEIGHT, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=torch.ones(2, 8, 1, 1)), ValueError, "x: got 4 dimensions, wanted 2 or 3"),
        (dict(conv_state=torch.ones(2, 8, 2)), ValueError, "conv_state: got 2 times, wanted at least 3"),
        (dict(conv_state=torch.ones(3, 8, 3)), ValueError, r"conv_state: got shape \[3, 8, 3\], wanted \[2, 8, any\]"),
        (dict(conv_state=torch.ones(2, 8, 3).half()), TypeError, "conv_state: got float16, wanted float32"),
        (
            dict(conv_state_indices=torch.ones(3).int()),
            ValueError,
            r"conv_state_indices: got shape \[3\], wanted \[2\]",
        ),
        (dict(cache_seqlens=torch.ones(2)), TypeError, "cache_seqlens: got float32, wanted int32 or int64"),
        (dict(x=torch.ones(2, 8, 4), cache_seqlens=torch.ones(2).int()), ValueError, "x: got 4 tokens, wanted at most"),
    ],
)
def test_bad_input_of_a_step(change, error, message, device):
    given = dict(x=torch.ones(2, 8), conv_state=torch.ones(2, 8, 3), weight=WEIGHT) | change
    given = {name: one.to(device) for name, one in given.items()}
    with pytest.raises(error, match=f"causal_conv1d_update: {message}"):
        flashinfer.causal_conv1d_update(**given)


def test_states_that_share_memory(device):
    x, weight, state = torch.ones(2, 8, device=device), WEIGHT.to(device), torch.ones(1, 8, 3, device=device)
    with pytest.raises(ValueError, match="conv_state: has elements that share memory"):
        flashinfer.causal_conv1d_update(x, state.expand(2, 8, 3), weight)
    assert (state == 1).all()
