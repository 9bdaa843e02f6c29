"""Every sample against the interval of the CDF that its uniform number falls into."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import sampling

from ..support.sampling_oracle import KINDS, Filters, is_sample, philox4x32_10, rows_of, uniform

SEED, OFFSET = 0x1234_5678_9ABC_DEF1, 2**33 + 5
VOCABS = [1, 2, 31, 111, 512, 513, 5000]
LARGE = [32000, 262144]


def test_philox_gives_the_known_answers():
    assert philox4x32_10((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32_10(counter, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def filters_of(vocab_size: int) -> list[tuple[str, dict[str, Any], Filters]]:
    """Return the name of a function, its arguments, and their meaning as filters."""
    k = max(1, vocab_size // 10)
    both = "top_k_top_p_sampling_from_probs"
    return [
        ("sampling_from_probs", {}, Filters()),
        ("top_k_sampling_from_probs", dict(top_k=k), Filters(top_k=k)),
        ("top_k_sampling_from_probs", dict(top_k=3), Filters(top_k=3)),
        ("top_p_sampling_from_probs", dict(top_p=0.9), Filters(top_p=0.9)),
        ("top_p_sampling_from_probs", dict(top_p=1e-6), Filters(top_p=1e-6)),
        ("min_p_sampling_from_probs", dict(min_p=0.1), Filters(min_p=0.1)),
        (both, dict(top_k=k, top_p=0.6), Filters(top_k=k, top_p=0.6, top_k_first=True)),
        (both, dict(top_k=k, top_p=0.3, filter_apply_order="joint"), Filters(top_k=k, top_p=0.3)),
    ]


def check(name: str, given: torch.Tensor, x: torch.Tensor, numbers: dict[str, Any], filters: Filters, error: float):
    samples = getattr(sampling, name)(given, **numbers, seed=SEED, offset=OFFSET)
    assert samples.dtype == torch.int32 and samples.shape == given.shape[:1]
    for row, got in enumerate(samples.tolist()):
        assert is_sample(x[row], uniform(SEED, OFFSET, row), got, filters, error), (name, numbers, row, got)


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_from_probs(kind, vocab_size, device):
    x = rows_of(kind, 3, vocab_size)
    for name, numbers, filters in filters_of(vocab_size):
        check(name, x.to(device), x, numbers, filters, 1e-6)


@pytest.mark.parametrize("vocab_size", LARGE)
def test_samples_of_large_vocabularies(vocab_size, device):
    for kind in ("normal", "zipf"):
        x = rows_of(kind, 1, vocab_size)
        for name, numbers, filters in filters_of(vocab_size):
            check(name, x.to(device), x, numbers, filters, 1e-6)


@pytest.mark.parametrize("vocab_size", [1, 111, 513, 32000])
def test_samples_of_half_types(vocab_size, dtype, device):
    x = rows_of("normal", 3, vocab_size).to(dtype)
    for name, numbers, filters in filters_of(vocab_size):
        if filters.top_k_first and dtype != torch.float32:
            continue  # kept elements are rounded before the second filter: see test_sampling_bits
        check(name, x.to(device), x.float(), numbers, filters, 1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 111, 513, 32000, 128256])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_samples_from_logits(vocab_size, scale, dtype, device):
    logits = (torch.randn(3, vocab_size) * scale).to(dtype)
    x = torch.softmax(logits.double(), -1)
    check("sampling_from_logits", logits.to(device), x, {}, Filters(), 5e-6)
    k = max(1, vocab_size // 20)
    both = dict(top_k=k, top_p=0.8)
    probs = sampling.softmax(logits.to(device)).cpu()
    name = "top_k_top_p_sampling_from_logits"
    masked = sampling.softmax(sampling.top_k_mask_logits(logits.to(device), k)).cpu()
    check(name, logits.to(device), masked, both, Filters(top_p=0.8), 5e-6)
    check(name, logits.to(device), probs, both | dict(filter_apply_order="joint"), Filters(top_k=k, top_p=0.8), 5e-6)


def test_parameters_of_each_output_and_row(device):
    x = rows_of("normal", 6, 1000)
    k, p = torch.tensor([1, 50, 0, -1, 1000, 7]), torch.tensor([0.5, 1.0, 0.2, 0.9, 0.0, 1.5])
    samples = sampling.top_k_top_p_sampling_from_probs(
        x.to(device), k.to(device), p.to(device), filter_apply_order="joint", seed=SEED, offset=OFFSET
    )
    indices = torch.tensor([5, 5, 0, 3, 3, 3, 2], dtype=torch.int64)
    by_row = sampling.top_k_sampling_from_probs(x.to(device), k.int().to(device), indices.to(device), seed=1, offset=2)
    by_output = sampling.top_p_sampling_from_probs(x.to(device), torch.linspace(0.1, 0.9, 7).to(device),
                                                   indices.to(device), seed=1, offset=2)  # fmt: skip
    assert by_row.dtype == torch.int64
    for i in range(6):
        filters = Filters(top_k=int(k[i]), top_p=float(p[i]))
        assert is_sample(x[i], uniform(SEED, OFFSET, i), int(samples[i]), filters, 1e-6)
    for i, row in enumerate(indices.tolist()):
        u = uniform(1, 2, i)
        assert is_sample(x[row], u, int(by_row[i]), Filters(top_k=int(k[row])), 1e-6)
        p_i = float(torch.linspace(0.1, 0.9, 7)[i])
        assert is_sample(x[row], u, int(by_output[i]), Filters(top_p=p_i), 1e-6)


def test_seeds_offsets_and_slots_are_used_as_they_are(device):
    x = rows_of("flat", 5, 3000)
    seeds, offsets = torch.randint(-(2**63), 2**63 - 1, (2, 5))
    slots = torch.tensor([7, 0, 3, 2**32 + 3, 7])
    given = dict(seed=seeds.to(device), offset=offsets.to(device))
    for slot in (None, 0, slots.to(device)):
        samples = sampling.sampling_from_probs(x.to(device), **given, slot=slot)
        for i in range(5):
            row = i if slot is None else 0 if isinstance(slot, int) else int(slots[i])
            u = uniform(int(seeds[i]), int(offsets[i]), row)
            assert is_sample(x[i], u, int(samples[i]), Filters(), 1e-6)
    one = sampling.sampling_from_probs(x.to(device), seed=seeds[:1].to(device), offset=offsets[:1].to(device))
    same = sampling.sampling_from_probs(x.to(device), seed=int(seeds[0]) + 2**64, offset=int(offsets[0]))
    assert one.equal(same)
    unsigned = {name: word.view(torch.uint64) for name, word in given.items()}
    assert sampling.sampling_from_probs(x.to(device), **unsigned).equal(
        sampling.sampling_from_probs(x.to(device), **given)
    )


def test_invalid_rows_do_not_change_others(device):
    good = rows_of("normal", 8, 700)
    x = good.clone()
    x[1, 333], x[2], x[3, 5], x[4], x[5] = float("nan"), 0.0, float("inf"), -1.0, -good[5]
    x[6, :699] = -1.0  # only the last token remains
    for name, numbers, _ in filters_of(700):
        samples, valid = getattr(sampling, name)(x.to(device), **numbers, seed=3, offset=4, return_valid=True)
        want = getattr(sampling, name)(good.to(device), **numbers, seed=3, offset=4)
        assert valid.tolist() == [True, False, False, False, False, False, True, True], name
        assert samples[1:6].eq(0).all() and samples[6] == 699
        assert samples[[0, 7]].equal(want[[0, 7]])
    nan = torch.tensor([0.5, float("nan")] * 4, device=device)
    _, valid = sampling.top_p_sampling_from_probs(good.to(device), nan, seed=3, offset=4, return_valid=True)
    assert valid.tolist() == [True, False] * 4


def test_strided_rows_and_empty_batches(device, dtype):
    wide = rows_of("normal", 6, 1003).to(dtype).to(device)
    view = wide[::2, 1:1001]
    for name, numbers, _ in filters_of(1000):
        call = getattr(sampling, name)
        assert call(view, **numbers, seed=5, offset=6).equal(call(view.contiguous(), **numbers, seed=5, offset=6))
        assert call(view[:0], **numbers).shape == (0,)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert sampling.sampling_from_probs(view, none).dtype == torch.int64


def test_generators(device):
    x = rows_of("flat", 64, 999).to(device)
    first = torch.Generator(device).manual_seed(7)
    second = torch.Generator(device).manual_seed(7)
    a, b = (sampling.sampling_from_probs(x, generator=first) for _ in range(2))
    assert a.equal(sampling.sampling_from_probs(x, generator=second)) and not a.equal(b)
    assert b.equal(sampling.sampling_from_probs(x, generator=second))
    torch.manual_seed(3)
    c = sampling.sampling_from_probs(x)
    torch.manual_seed(3)
    assert c.equal(sampling.sampling_from_probs(x)) and not c.equal(sampling.sampling_from_probs(x))
    assert flashinfer.sampling_from_probs is sampling.sampling_from_probs
