"""Equal bits of fused and composed calls, single rows and batches, repeated calls, CPU and CUDA."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..conftest import DEVICES
from ..support.sampling_oracle import KINDS, rows_of

RANDOM = dict(seed=11, offset=12)
VOCABS = [111, 513, 5000, 32000]


def draws(vocab_size: int, rows: int, **seeds):
    """Return the draws of each sampling function, by its name."""
    k = max(1, vocab_size // 9)
    given = seeds or RANDOM
    return {
        "plain": lambda x: sampling.sampling_from_probs(x, **given),
        "top_k": lambda x: sampling.top_k_sampling_from_probs(x, k, **given),
        "top_p": lambda x: sampling.top_p_sampling_from_probs(x, 0.8, **given),
        "min_p": lambda x: sampling.min_p_sampling_from_probs(x, 0.2, **given),
        "first": lambda x: sampling.top_k_top_p_sampling_from_probs(x, k, 0.7, **given),
        "joint": lambda x: sampling.top_k_top_p_sampling_from_probs(x, k, 0.7, filter_apply_order="joint", **given),
    }


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_fused_equals_composed(vocab_size, dtype, device):
    logits = (torch.randn(40, vocab_size, device=device) * 2).to(dtype)
    probs = sampling.softmax(logits)
    for k in (3, vocab_size // 8):
        joint = dict(top_k=k, top_p=0.6, filter_apply_order="joint", **RANDOM)
        fused = sampling.top_k_top_p_sampling_from_logits(logits, **joint)
        assert fused.equal(sampling.top_k_top_p_sampling_from_probs(probs, **joint))
        # Logits are masked before the softmax. Renormalising afterwards would round twice.
        masked = sampling.softmax(sampling.top_k_mask_logits(logits, k))
        for top_p in (0.6, 1.0):
            fused = sampling.top_k_top_p_sampling_from_logits(logits, k, top_p, **RANDOM)
            assert fused.equal(sampling.top_p_sampling_from_probs(masked, top_p, **RANDOM))
    k = vocab_size // 8
    rounded = probs.to(dtype)
    composed = sampling.top_p_sampling_from_probs(sampling.top_k_renorm_probs(rounded, k), 0.6, **RANDOM)
    assert composed.equal(sampling.top_k_top_p_sampling_from_probs(rounded, k, 0.6, **RANDOM))


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_a_request_draws_the_same_in_any_batch(vocab_size, device):
    x = rows_of("normal", 33, vocab_size).to(device)
    seeds = torch.randint(2**62, (33,), device=device)
    zeros = torch.zeros_like(seeds)
    whole = {name: draw(x) for name, draw in draws(vocab_size, 33, seed=seeds, offset=zeros, slot=0).items()}
    for row in (0, 17, 32):
        one = slice(row, row + 1)
        alone = draws(vocab_size, 1, seed=seeds[one], offset=zeros[one], slot=0)
        for name, draw in alone.items():
            assert draw(x[one]).equal(whole[name][one]), (name, row)


def test_many_rows_draw_as_single_rows(device):
    """Take more rows than SMs: kernels collect candidates while they read a row, if they fit."""
    rows, vocab_size = 144, 17000
    x = torch.cat([rows_of(kind, rows // len(KINDS) + 1, vocab_size) for kind in KINDS])[:rows].to(device)
    ways = {
        "top_k 1": lambda x, slot: sampling.top_k_sampling_from_probs(x, 1, **RANDOM, slot=slot),
        "top_k 50": lambda x, slot: sampling.top_k_sampling_from_probs(x, 50, **RANDOM, slot=slot),
        "min_p": lambda x, slot: sampling.min_p_sampling_from_probs(x, 0.1, **RANDOM, slot=slot),
        "a little": lambda x, slot: sampling.min_p_sampling_from_probs(x, 1e-3, **RANDOM, slot=slot),
        "first": lambda x, slot: sampling.top_k_top_p_sampling_from_probs(x, 70, 0.8, **RANDOM, slot=slot),
        "joint": lambda x, slot: sampling.top_k_top_p_sampling_from_probs(
            x, 70, 0.4, filter_apply_order="joint", **RANDOM, slot=slot
        ),
        "logits": lambda x, slot: sampling.top_k_top_p_sampling_from_logits(x.log(), 20, 0.9, **RANDOM, slot=slot),
    }
    slots = torch.arange(rows, device=device)
    numbers = torch.linspace(0, 1, rows, device=device)
    each = sampling.min_p_sampling_from_probs(x, numbers, **RANDOM)
    for name, draw in ways.items():
        whole = draw(x, slots)
        for row in range(0, rows, 3):
            one = slice(row, row + 1)
            assert draw(x[one], row).equal(whole[one]), (name, row)
            alone = sampling.min_p_sampling_from_probs(x[one], numbers[one], **RANDOM, slot=row)
            assert alone.equal(each[one]), row


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_indices_and_repetitions_change_nothing(vocab_size, device):
    x = rows_of("peaked", 5, vocab_size).to(device)
    indices = torch.tensor([0] * 40 + [3] * 25 + [1, 4, 1, 4, 2], dtype=torch.int32, device=device)
    for name, draw in draws(vocab_size, 5).items():
        assert draw(x[indices.long()]).equal(draw(x[indices.long()])), name
    k = max(1, vocab_size // 9)
    for function, numbers in ((sampling.sampling_from_probs, ()), (sampling.top_k_sampling_from_probs, (k,)),
                              (sampling.top_p_sampling_from_probs, (0.8,))):  # fmt: skip
        by_index = function(x, *numbers, indices=indices, **RANDOM)
        assert by_index.equal(function(x[indices.long()], *numbers, **RANDOM))


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU")
@pytest.mark.parametrize("vocab_size", [513, 5000])
def test_the_cpu_and_cuda_draw_the_same(vocab_size):
    x = rows_of("normal", 4000, vocab_size)
    for name, draw in draws(vocab_size, 4000).items():
        assert (draw(x) != draw(x.cuda()).cpu()).sum() <= 1, name


@pytest.mark.parametrize("length", [2_400_001, 6_600_000, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_draw_as_short_ones(length, dtype, device):
    """Elements of no weight around a row move its draws only. A GPU takes other kernels for the longest rows."""
    if device == "cpu" and (length > 2_400_001 or dtype != torch.float32):
        pytest.skip("the CPU has one kernel, and takes seconds")
    count = 1_000_003
    short = torch.cat([rows_of("normal", 1, count), rows_of("flat", 1, count)]).to(dtype).to(device)
    indices = torch.tensor([0] * 40 + [1] * 25 + [0], device=device)
    for draw in (sampling.sampling_from_probs, lambda x, **more: sampling.sampling_from_logits(x.log(), **more)):
        want = draw(short, **RANDOM), draw(short, indices=indices, **RANDOM)
        for shift in (0, (length - count) // 512 * 512):  # chunks keep their elements
            row = torch.zeros(2, length, dtype=dtype, device=device)
            row[:, shift : shift + count] = short
            assert draw(row, **RANDOM).equal(want[0] + shift)
            assert draw(row, indices=indices, **RANDOM).equal(want[1] + shift)


def test_long_rows_without_a_distribution_are_invalid(device):
    length = 2**20 if device == "cpu" else 2**24
    row = torch.zeros(3, length, device=device)
    row[1, 9], row[2, length - 3] = torch.nan, 1.0
    samples, valid = sampling.sampling_from_probs(row, return_valid=True, **RANDOM)
    assert valid.tolist() == [False, False, True] and int(samples[2]) == length - 3
    assert int(sampling.sampling_from_logits(row.log(), **RANDOM)[2]) == length - 3
