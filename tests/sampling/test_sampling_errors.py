"""Exceptions and their texts for mistakes of callers."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

PROBS = torch.full((4, 10), 0.1)
TWO = torch.full((2, 2), 0.5)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: sampling.top_p_sampling_from_probs(PROBS, TWO), ValueError,
         "Expected a 1D tensor or scalar for the sampling parameter, but got a 2D tensor."),
        (lambda: sampling.top_k_renorm_probs(PROBS, torch.tensor(3)), ValueError,
         r"Expected a 1D tensor of shape \(batch_size,\) or scalar .*but got a 0-dimensional tensor."),
        (lambda: sampling.top_p_renorm_probs(PROBS, torch.ones(3)), ValueError,
         "Sampling parameter tensor batch size mismatch: expected length 4"),
        (lambda: sampling.top_k_top_p_sampling_from_probs(PROBS, 3, 0.5, filter_apply_order="p"), ValueError,
         "filter_apply_order: got 'p', wanted 'top_k_first' or 'joint'"),
        (lambda: sampling.sampling_from_probs(PROBS, seed=1, offset=torch.zeros(1, dtype=torch.int64)), ValueError,
         "seed and offset must both be tensors or both be scalars"),
        (lambda: sampling.sampling_from_probs(PROBS.log() * float("nan"), check_nan=True), ValueError,
         "Input probs contains NaN."),
        (lambda: sampling.sampling_from_logits(PROBS * float("nan"), check_nan=True), ValueError,
         "Input logits contains NaN."),
        (lambda: sampling.sampling_from_probs(PROBS[0]), ValueError, "probs: got 1 dimensions, wanted 2"),
        (lambda: sampling.softmax(PROBS[None]), ValueError, "logits: got 3 dimensions, wanted 2"),
        (lambda: sampling.softmax(PROBS[:, :0]), ValueError, "logits: got 0 elements in a row"),
        (lambda: sampling.softmax(PROBS.t()), ValueError, "logits: got stride"),
        (lambda: sampling.softmax(PROBS, temperature=True), TypeError, "softmax: temperature: got bool"),
        (lambda: sampling.softmax(PROBS, temperature="hot"), TypeError, "temperature: got str"),
        (lambda: sampling.top_k_mask_logits(PROBS, None), TypeError, "top_k_mask_logits: top_k: got NoneType"),
        (lambda: sampling.top_k_renorm_probs(PROBS, 2.5), ValueError, "top_k_renorm_probs: top_k: got 2.5, wanted an int"),
        (lambda: sampling.top_k_sampling_from_probs(PROBS, float("nan")), ValueError,
         "top_k_sampling_from_probs: top_k: got nan, wanted an integer"),
        (lambda: sampling.top_k_sampling_from_probs(PROBS, float("inf")), ValueError, "top_k: got inf, wanted an integer"),
        (lambda: sampling.min_p_sampling_from_probs(PROBS, "a"), TypeError, "min_p_sampling_from_probs: min_p: got str"),
        (lambda: sampling.top_p_renorm_probs(PROBS, "a"), TypeError, "top_p_renorm_probs: top_p: got str"),
        (lambda: sampling.sampling_from_probs(PROBS.double()), TypeError, "probs: got float64"),
        (lambda: sampling.sampling_from_probs(PROBS.tolist()), TypeError, "probs: got list"),
        (lambda: sampling.sampling_from_probs(PROBS, PROBS[0]), TypeError, "indices: got float32"),
        (lambda: sampling.sampling_from_probs(PROBS, torch.tensor([0, 4])), IndexError, "indices: got 4, wanted 0 to 3"),
        (lambda: sampling.sampling_from_probs(PROBS, [0]), TypeError,
         "sampling_from_probs: indices: got list, wanted Tensor"),
        (lambda: sampling.sampling_from_logits(PROBS, torch.tensor(0)), ValueError, "indices: got 0 dimensions, wanted 1"),
        (lambda: sampling.sampling_from_probs(PROBS, generator=5), TypeError,
         "sampling_from_probs: generator: got int, wanted torch.Generator"),
        (lambda: sampling.chain_speculative_sampling(PROBS[None, :3], torch.ones(1, 3).int(), PROBS[None], generator=5),
         TypeError, "chain_speculative_sampling: generator: got int, wanted torch.Generator"),
        (lambda: sampling.sampling_from_probs(PROBS, seed=1.5), TypeError, "sampling_from_probs: seed: got float"),
        (lambda: sampling.sampling_from_probs(PROBS, seed=torch.ones(4), offset=torch.ones(4)), TypeError, "seed: got"),
        (lambda: sampling.sampling_from_probs(PROBS, seed=torch.ones(3, dtype=torch.int64)), ValueError,
         r"seed: got shape \[3\]"),
        (lambda: sampling.sampling_from_probs(PROBS, offset=3), ValueError, "offset: got an offset without a seed"),
        (lambda: sampling.sampling_from_probs(PROBS, seed=3, generator=torch.Generator()), ValueError, "generator"),
        (lambda: sampling.top_k(PROBS, 11), ValueError, "k: got 11, wanted 1 to 10"),
        (lambda: sampling.top_k(PROBS, 0), ValueError, "k: got 0"),
    ],
)  # fmt: skip
def test_mistakes(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_gradients_are_refused():
    from flashinfer.errors import GradientError

    logits = torch.randn(2, 9, requires_grad=True)
    for call in (sampling.softmax, lambda x: sampling.top_k_mask_logits(x, 2), lambda x: sampling.top_k(x, 2)):
        with pytest.raises(GradientError):
            call(logits)
    assert sampling.sampling_from_logits(logits).shape == (2,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wanted a GPU")
def test_rows_longer_than_any_gpu_takes():
    rows = torch.rand(1, 2**24, device="cuda")
    for call in (
        lambda x: sampling.top_p_sampling_from_probs(x, 0.5),
        sampling.softmax,
        lambda x: sampling.top_k_renorm_probs(x, 5000),
    ):
        with pytest.raises(ValueError, match=r"got 16777216 elements in a row, wanted at most \d+ on this device"):
            call(rows)
