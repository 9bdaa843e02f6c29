"""FlashInfer's Triton address of merging."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
import flashinfer.triton


def test_the_address_holds_the_librarys_functions():
    for name in ("merge_state", "merge_state_in_place", "merge_states"):
        assert getattr(flashinfer.triton.cascade, name) is getattr(flashinfer.cascade, name)


def test_segments_of_differing_lengths(dtype, device):
    lengths = [3, 0, 1, 17, 2]
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    v, s = torch.randn(sum(lengths), 5, 24, device=device).to(dtype), torch.randn(sum(lengths), 5, device=device) * 9
    s[0], s[3] = -math.inf, -math.inf  # one state of a segment, and a segment's only one
    got_v, got_s = flashinfer.triton.cascade.variable_length_merge_states(v, s, indptr)
    assert got_v.dtype == dtype and got_s.dtype == torch.float32
    start = 0
    for i, length in enumerate(lengths):
        own_v, own_s = v[start : start + length].cpu().double(), s[start : start + length].cpu().double()
        start += length
        want_s = torch.logsumexp(own_s * math.log(2), 0) / math.log(2) if length else torch.full((5,), -math.inf)
        weights = torch.exp2(own_s - want_s).nan_to_num(0.0)
        torch.testing.assert_close(got_s[i].cpu().double(), want_s.double(), rtol=1e-6, atol=1e-5)
        want_v = (own_v * weights[..., None]).sum(0)
        torch.testing.assert_close(
            got_v[i].cpu().double(),
            want_v,
            rtol=2e-2 if dtype != torch.float32 else 1e-5,
            atol=1e-2 if dtype != torch.float32 else 1e-5,
        )


@pytest.mark.parametrize(
    "v, s, indptr, message",
    [
        ((4, 2, 8), (4, 3), [0, 4], r"s: got shape \[4, 3\], wanted \[4, 2\]"),
        ((4, 2, 8), (4, 2), [[0, 4]], r"indptr: got shape \[1, 2\], wanted \[segments \+ 1\]"),
    ],
)
def test_bad_shapes(v, s, indptr, message):
    with pytest.raises(ValueError, match=message):
        flashinfer.triton.cascade.variable_length_merge_states(torch.ones(v), torch.ones(s), torch.tensor(indptr))
