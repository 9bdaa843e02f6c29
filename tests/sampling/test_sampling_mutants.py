"""Draws with known bits: a wrong uniform number, offset or comparison changes them."""

from __future__ import annotations

import torch

from flashinfer import sampling

from ..support.sampling_oracle import philox4x32_10

SEED, FIRST, MANY, VOCAB = 2**40 + 3, 2**33 + 1, 10_000, 200_003
MASK = 2**32 - 1


def words_of(offset: int, row: int) -> tuple[int, ...]:
    return philox4x32_10((offset & MASK, offset >> 32, row, 0), (SEED & MASK, SEED >> 32))


def token(offset: int, row: int, bits: int = 53) -> int:
    """Return floor(u * VOCAB) in integers: sums of ones are exact."""
    words = words_of(offset, row)
    uniform = (words[1] << 32 | words[0]) >> 11
    return ((uniform >> (53 - bits) << (53 - bits)) * VOCAB) >> 53


def test_each_sample_follows_from_53_bits(device):
    ones = torch.ones(1, VOCAB, device=device)
    offsets = FIRST + torch.arange(MANY)
    draws = dict(seed=torch.full((MANY,), SEED).to(device), offset=offsets.to(device))
    samples = sampling.sampling_from_probs(ones, torch.zeros(MANY, dtype=torch.int32, device=device), **draws, slot=7)
    want = [token(offset, 7) for offset in offsets.tolist()]
    assert samples.tolist() == want
    # The check detects 24 bits, quarters of offsets and another counter.
    some = offsets[:2000].tolist()
    assert sum(token(offset, 7, 24) != good for offset, good in zip(some, want, strict=False)) > 2
    assert sum(token(offset // 4, 7) != good for offset, good in zip(some, want, strict=False)) > 1900
    assert sum(token(offset, 0) != good for offset, good in zip(some, want, strict=False)) > 1900


def test_tokens_without_mass_are_never_accepted_or_drawn(device):
    """Detect ``<=`` instead of ``<``: it accepts 0 <= 0, and draws a token without mass at an edge."""
    draft, target = torch.zeros(64, 1, 9, device=device), torch.zeros(64, 2, 9, device=device)
    draft[:, :, 1], target[:, :, 2] = 1.0, 1.0
    ids = torch.full((64, 1), 5, dtype=torch.int32, device=device)
    tokens, accepted, emitted = sampling.chain_speculative_sampling(draft, ids, target, seed=1, offset=2)
    assert accepted.eq(0).all() and emitted.eq(0).all() and tokens[:, 0].eq(2).all() and tokens[:, 1].eq(-1).all()
    holes = torch.zeros(4096, 600, device=device)
    holes[:, 1::2] = 1.0
    samples = sampling.sampling_from_probs(holes, seed=3, offset=4)
    assert (samples % 2 == 1).all()
