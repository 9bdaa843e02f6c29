"""FlashInfer's Triton address of merging."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
import flashinfer.triton


def test_the_address_holds_the_librarys_functions():
    for name in ("merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"):
        assert name in flashinfer.cascade.__all__ and getattr(flashinfer, name) is getattr(flashinfer.cascade, name)
        assert getattr(flashinfer.triton.cascade, name) is getattr(flashinfer.cascade, name)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_segments_of_differing_lengths(kind, dtype, device):
    lengths = [3, 0, 1, 17, 2]
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    v, s = torch.randn(sum(lengths), 5, 24, device=device).to(dtype), torch.randn(sum(lengths), 5, device=device) * 9
    s[0], s[3] = -math.inf, -math.inf  # one state of a segment, and a segment's only one
    s = s.to(kind)
    got_v, got_s = flashinfer.cascade.variable_length_merge_states(v, s, indptr)
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
    "change, error, message",
    [
        (dict(v=torch.ones(4, 16)), ValueError, "v: got 2 dimensions, wanted 3"),
        (dict(v=torch.ones(4, 2, 8).int()), TypeError, "v: got torch.int32, wanted torch.float32"),
        (dict(v=None), TypeError, "v: got NoneType, wanted Tensor"),
        (dict(s=torch.ones(4, 3)), ValueError, r"s: got shape \[4, 3\], wanted \[4, 2\]"),
        (dict(s=torch.ones(4, 2).int()), TypeError, "s: got torch.int32, wanted torch.float32"),
        (dict(s=torch.ones(4, 2, device="meta")), ValueError, "s: got a tensor on meta, wanted one on"),
        (dict(indptr=torch.tensor([[0, 4]])), ValueError, r"indptr: got shape \[1, 2\], wanted a vector"),
        (dict(indptr=torch.tensor([0.0, 4.0])), TypeError, "indptr: got torch.float32, wanted torch.int32"),
        (dict(indptr=torch.tensor([], dtype=torch.int32)), ValueError, "indptr: got 0 elements, wanted at least 1"),
    ],
)
def test_bad_input(change, error, message, device):
    assert_refused(change, error, message, device)


@pytest.mark.parametrize(
    "indptr, message",
    [
        ([0, 3], r"got \(0, 3\), wanted \(0, 4\), all states of v"),
        ([1, 4], r"got \(1, 4\), wanted \(0, 4\)"),
        ([0, 3, 2, 4], "got 2 at 2 after 3, wanted numbers that"),
    ],
)
def test_bad_segments(indptr, message):
    """Only the CPU reads the numbers of a table."""
    assert_refused(dict(indptr=torch.tensor(indptr)), ValueError, f"indptr: {message}", "cpu")


def assert_refused(change, error, message, device) -> None:
    given = dict(v=torch.ones(4, 2, 8), s=torch.ones(4, 2), indptr=torch.tensor([0, 4])) | change
    given = {name: x if x is None or x.is_meta else x.to(device) for name, x in given.items()}
    with pytest.raises(error, match=f"^variable_length_merge_states: {message}"):
        flashinfer.triton.cascade.variable_length_merge_states(**given)
