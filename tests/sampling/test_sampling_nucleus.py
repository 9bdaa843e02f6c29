"""Top-p of more rows than SMs: a sample of each row gives an interval for its threshold.

Rows with a misleading sample, or with more equal elements than a CTA collects, are reread.
"""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..support.sampling_oracle import KINDS, Filters, is_sample, rows_of, top_p_thresholds, uniform
from .test_filters import check_renormalised

RANDOM = dict(seed=21, offset=22)
ROWS = 148  # SMs of the largest GPUs
MISLEADING = ("blocks", "ascending", "alike", "levels", "late")


def many_rows(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    noise = torch.randn(rows, vocab_size)
    if kind == "blocks":  # 1024 equal elements at a time: large or small
        scales = 3 * torch.randn(rows, vocab_size // 1024 + 1)
        return torch.softmax(noise + scales.repeat_interleave(1024, -1)[:, :vocab_size], -1)
    if kind == "ascending":
        return torch.softmax(noise.sort(-1).values, -1)
    if kind == "alike":  # within a hundredth
        return torch.softmax(0.002 * noise, -1)
    if kind == "levels":
        return torch.where(noise > 0, 0.3, 0.11) * 1e-3
    if kind == "late":  # zeros in the first half
        noise[:, : vocab_size // 2] -= 40
        return torch.softmax(noise, -1)
    return rows_of(kind, rows, vocab_size)


def shares(rows: int) -> torch.Tensor:
    some = torch.tensor([0.0, 1e-6, 1 - 1e-7, 1.0, 1.5, 0.9, 0.5])
    return torch.cat([some, torch.rand(rows - len(some))])


@pytest.mark.parametrize("rows, vocab_size", [(ROWS, 33000), (64, 32768), (ROWS, 17000)])
@pytest.mark.parametrize("kind", [*KINDS, *MISLEADING])
def test_rows_draw_as_single_rows(kind, rows, vocab_size, device):
    x, p = many_rows(kind, rows, vocab_size).to(device), shares(rows).to(device)
    whole, valid = sampling.top_p_sampling_from_probs(x, p, **RANDOM, return_valid=True)
    assert valid.all()
    for row in range(0, rows, 5):
        one = slice(row, row + 1)
        assert sampling.top_p_sampling_from_probs(x[one], p[one], **RANDOM, slot=row).equal(whole[one]), row
        u = uniform(RANDOM["seed"], RANDOM["offset"], row)
        assert is_sample(x[row], u, int(whole[row]), Filters(top_p=float(p[row])), 1e-6), row


@pytest.mark.parametrize("vocab_size", [17000, 131072])
def test_half_types_and_strides(vocab_size, dtype, device):
    wide = many_rows("normal", ROWS, vocab_size + 8).to(dtype).to(device)
    for x in (wide[:, :vocab_size], wide[:, 8:], wide[:, 1 : vocab_size + 1]):
        whole = sampling.top_p_sampling_from_probs(x, 0.9, **RANDOM)
        for row in range(0, ROWS, 9):
            alone = sampling.top_p_sampling_from_probs(x[row : row + 1], 0.9, **RANDOM, slot=row)
            assert alone.equal(whole[row : row + 1]), row


@pytest.mark.parametrize("kind", [*KINDS, *MISLEADING])
def test_renormalised_rows(kind, dtype, device):
    if kind == "subnormal" and dtype == torch.float16:
        return
    vocab_size = 16900
    x, p = many_rows(kind, ROWS, vocab_size).to(dtype), shares(ROWS)
    out = sampling.top_p_renorm_probs(x.to(device), p.to(device))
    for row in range(0, ROWS, 1 if device == "cuda" else 9):
        wide = x[row].double()
        cuts = top_p_thresholds(torch.where(wide > 0, wide, 0.0), float(p[row]), 1e-6 * float(wide.sum()))
        check_renormalised(out[row], x[row], cuts)


def test_rows_without_a_result_do_not_change_others(device):
    x = many_rows("normal", ROWS, 17000).to(device)
    want = sampling.top_p_renorm_probs(x, 0.75)
    samples = sampling.top_p_sampling_from_probs(x, 0.75, **RANDOM)
    x[3], x[5, 9000], x[7, 16999], x[11] = 0.0, float("nan"), float("inf"), -1.0
    p = torch.full((ROWS,), 0.75, device=device)
    p[13] = float("nan")
    bad = torch.zeros(ROWS, dtype=torch.bool, device=device)
    bad[[3, 5, 7, 11, 13]] = True
    got, valid = sampling.top_p_sampling_from_probs(x, p, **RANDOM, return_valid=True)
    assert valid.equal(~bad) and got[bad].eq(0).all() and got[~bad].equal(samples[~bad])
    out = sampling.top_p_renorm_probs(x, p)
    assert out[[3, 11]].eq(0).all() and out[[5, 7, 13]].isnan().all() and out[~bad].equal(want[~bad])


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_share_that_rounds_to_0_keeps_the_largest(rows, device):
    """Take 1e-300 of a row with the sum 1e-30: the product is below every double."""
    x = torch.rand(rows, 17000) * 1e-34
    largest = x.argmax(-1)
    x[torch.arange(rows), largest] *= 1.5
    x = x.to(device)
    got, valid = sampling.top_p_sampling_from_probs(x, 1e-300, **RANDOM, return_valid=True)
    assert valid.all() and got.cpu().equal(largest.to(got.dtype))
    out = sampling.top_p_renorm_probs(x, 1e-300)
    assert out.argmax(-1).cpu().equal(largest) and (out.amax(-1) - 1).abs().max() < 1e-6
    assert (out > 0).sum(-1).eq(1).all()
