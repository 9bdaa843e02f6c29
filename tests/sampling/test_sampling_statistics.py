"""Statistics of draws with fixed seeds: no failure by chance, and misuse of the generator shows."""

from __future__ import annotations

import torch

from flashinfer import sampling

from ..support.sampling_oracle import rows_of


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, float]:
    """Return chi-square over cells of 25 or more expected draws, and its bound at p = 1e-6 (Wilson-Hilferty)."""
    draws = counts.sum()
    order = probs.argsort()
    ends = (probs[order].cumsum(0) * draws / 25).long().clamp(max=int(draws) // 25 - 1)
    cells = torch.zeros(int(ends[-1]) + 1, dtype=torch.float64)
    want, got = cells.index_add(0, ends, probs[order] * draws), cells.index_add(0, ends, counts[order].double())
    kept = want > 0
    degrees = float(kept.sum() - 1)
    bound = degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3
    return float(((got - want) ** 2 / want)[kept].sum()), bound


def test_frequencies(device):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 2000, generator=generator)
    probs = logits.softmax(-1)
    indices = torch.zeros(1_000_000, dtype=torch.int32, device=device)
    ways = {
        "probs": sampling.sampling_from_probs(probs.to(device), indices, seed=1, offset=2),
        "logits": sampling.sampling_from_logits(logits.to(device), indices, seed=1, offset=3),
        "top_p": sampling.top_p_sampling_from_probs(probs.to(device), 0.7, indices, seed=1, offset=4),
    }
    for name, samples in ways.items():
        want = probs[0].double()
        if name == "top_p":
            want = sampling.top_p_renorm_probs(probs, 0.7)[0].double()
        counts = samples.cpu().long().bincount(minlength=2000)
        assert counts[want == 0].sum() == 0
        found, bound = chi_square(counts[want > 0], want[want > 0] / want.sum())
        assert found < bound, (name, found, bound)


def test_offsets_and_rows_are_independent(device):
    """Correlate adjacent draws in both directions: 2^17 tokens reveal the first 17 bits of u."""
    flat = torch.ones(1, 2**17, device=device)
    many = 100_000
    words = torch.arange(many, device=device)
    same = torch.zeros(many, dtype=torch.int32, device=device)
    by_offset = sampling.sampling_from_probs(flat, same, seed=torch.zeros_like(words), offset=words, slot=0)
    by_row = sampling.sampling_from_probs(flat, same, seed=0, offset=0)
    by_seed = sampling.sampling_from_probs(flat, same, seed=words, offset=torch.zeros_like(words), slot=0)
    for samples in (by_offset, by_row, by_seed):
        u = samples.cpu().double() / 2**17 - 0.5
        assert abs(float(u.mean())) < 5 * (1 / 12 / many) ** 0.5
        for lag in (1, 2, 4, 32):
            correlation = float((u[lag:] * u[:-lag]).mean() * 12)
            assert abs(correlation) < 5 / many**0.5, (lag, correlation)
        assert samples.unique().numel() > 0.6 * many  # 2^17 (1 - e^-0.763) = 0.70 of them


def test_all_53_bits_are_used(device):
    """Split a tail of 2^-30 of the mass into 256 tokens: 24 bits could not tell them apart."""
    row = rows_of("equal", 1, 257)
    row[0, 0], row[0, 1:] = 1.0, 2.0**-38
    # Draws from the tail are rare: the oracle searches the offsets for a u close to 1.
    from ..support.sampling_oracle import Filters, is_sample, uniform

    offsets = torch.arange(4000)
    samples = sampling.sampling_from_probs(row.to(device).expand(4000, 257), seed=torch.zeros_like(offsets).to(device),
                                           offset=offsets.to(device), slot=0)  # fmt: skip
    for at in range(0, 4000, 400):
        assert is_sample(row[0], uniform(0, at, 0), int(samples[at]), Filters(), 1e-12)
