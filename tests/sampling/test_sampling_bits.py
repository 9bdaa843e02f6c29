"""Fused equals composed, alone equals in a batch, once equals again, and the CPU equals CUDA: bit for bit."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..conftest import DEVICES
from ..support.sampling_oracle import rows_of

RANDOM = dict(seed=11, offset=12)
VOCABS = [111, 513, 5000, 32000]


def draws(vocab_size: int, rows: int, **seeds):
    """Name of a way to draw -> what it gives for rows."""
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
        # What is drawn from logits is masked before the softmax: renormalised afterwards it is rounded twice.
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


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU beside the CPU")
@pytest.mark.parametrize("vocab_size", [513, 5000])
def test_the_cpu_draws_what_cuda_draws(vocab_size):
    x = rows_of("normal", 4000, vocab_size)
    for name, draw in draws(vocab_size, 4000).items():
        assert (draw(x) != draw(x.cuda()).cpu()).sum() <= 1, name
