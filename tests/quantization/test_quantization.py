"""The quantization family against numpy."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch

import flashinfer

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 4097, 1_000_003]


@pytest.fixture(params=["big", "little"])
def bitorder(request) -> str:
    return request.param


@pytest.fixture(params=[torch.bool, torch.uint8], ids=["bool", "uint8"])
def kind(request) -> torch.dtype:
    return request.param


def booleans(n: int, kind: torch.dtype, device: str, offset: int = 0) -> torch.Tensor:
    """Return n values, about half true, inside a buffer of ones; with uint8 every value occurs."""
    x = torch.randint(0, 256, (n,), dtype=torch.uint8) * torch.randint(0, 2, (n,), dtype=torch.uint8)
    buffer = torch.ones(n + 64, dtype=kind, device=device)
    buffer[offset : offset + n] = x.to(kind).to(device)
    return buffer[offset : offset + n]


def packed_oracle(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    return torch.from_numpy(numpy.packbits(x.cpu().numpy() != 0, bitorder=bitorder))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 8, 13])
def test_packbits(n, offset, kind, bitorder, device):
    x = booleans(n, kind, device, offset)
    got = flashinfer.packbits(x, bitorder)
    assert got.dtype == torch.uint8 and got.device == x.device
    assert torch.equal(got.cpu(), packed_oracle(x, bitorder))


def test_big_is_the_default(device):
    x = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool, device=device)
    assert flashinfer.packbits(x).tolist() == [128, 192]
    assert flashinfer.packbits(x, "little").tolist() == [1, 3]
    packed, indptr = flashinfer.segment_packbits(x, torch.tensor([0, 9, 10], dtype=torch.int32, device=device))
    assert packed.tolist() == [128, 128, 128] and indptr.tolist() == [0, 2, 3]


@pytest.mark.parametrize("value", [1, 2, 64, 127, 128, 129, 255])
def test_any_value_but_zero_counts_as_one(value, bitorder, device):
    x = torch.zeros(70, dtype=torch.uint8, device=device)
    x[::3] = value
    assert torch.equal(flashinfer.packbits(x, bitorder).cpu(), packed_oracle(x, bitorder))


@pytest.mark.parametrize("lengths", [[], [0], [1], [8], [0, 0, 3, 0], "few", "many", "long"], ids=str)
@pytest.mark.parametrize("indptr_on", ["same", "cpu"])
@pytest.mark.parametrize("first", [0, 5])
def test_segment_packbits(lengths, indptr_on, first, kind, bitorder, device):
    if lengths == "few":
        lengths = [random.randrange(100) for _ in range(9)]
    elif lengths == "many":
        lengths = [random.randrange(20) for _ in range(2500)]
    elif lengths == "long":
        lengths = [random.randrange(90_000) for _ in range(5)]
    starts = list(itertools.accumulate(lengths, initial=first))
    x = booleans(starts[-1] + random.randrange(30), kind, device, offset=random.randrange(9))
    indptr = torch.tensor(starts, dtype=torch.int32, device=device if indptr_on == "same" else "cpu")
    parts = [packed_oracle(x[a:b], bitorder) for a, b in itertools.pairwise(starts)]
    want_indptr = numpy.cumsum([0, *(len(part) for part in parts)])
    got, packed_indptr = flashinfer.segment_packbits(x, indptr, bitorder)
    assert got.dtype == torch.uint8 and packed_indptr.dtype == torch.int32
    assert got.device == x.device and packed_indptr.device == x.device
    assert packed_indptr.tolist() == want_indptr.tolist()
    assert torch.equal(got.cpu(), torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize(
    "indptr, message",
    [
        ([0, 9, 8], r"indptr\[2\]: got 8, wanted 9 to 20"),
        ([0, 9, 21], r"indptr\[2\]: got 21, wanted 9 to 20"),
        ([-1, 9, 10], r"indptr\[0\]: got -1, wanted 0 to 20"),
        ([0, 2**31 - 1, 10], r"indptr\[1\]: got 2147483647"),
    ],
)
def test_segments_outside(indptr, message, device):
    """Pass segments outside x: an error on the CPU. On CUDA they read as 0, and nothing outside changes."""
    x = torch.ones(20, dtype=torch.bool, device=device)
    indptr = torch.tensor(indptr, dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            flashinfer.segment_packbits(x, indptr)
    else:
        packed, packed_indptr = flashinfer.segment_packbits(x, indptr)
        assert packed.numel() <= (20 + 14) // 8 and packed_indptr.numel() == 3


def test_bad_input(device):
    x, indptr = torch.ones(20, dtype=torch.bool, device=device), torch.tensor([0, 20], dtype=torch.int32, device=device)
    for call, error, message in [
        (lambda: flashinfer.packbits(x, "middle"), ValueError, "bitorder: got 'middle', wanted 'big' or 'little'"),
        (
            lambda: flashinfer.packbits(x.float()),
            TypeError,
            "x: got float32, wanted uint8 or bool|x: got float32, wanted bool or uint8",
        ),
        (lambda: flashinfer.packbits(x.view(4, 5)), ValueError, "x: got 2 dimensions, wanted 1"),
        (lambda: flashinfer.packbits(x[::2]), ValueError, "x: is not contiguous"),
        (lambda: flashinfer.packbits([True]), TypeError, "x: got list, wanted Tensor|x"),
        (lambda: flashinfer.segment_packbits(x, indptr, "Big"), ValueError, "segment_packbits: bitorder: got 'Big'"),
        (lambda: flashinfer.segment_packbits(x, indptr.float()), TypeError, "indptr: got torch.float32, wanted"),
        (lambda: flashinfer.segment_packbits(x, indptr.cpu().long() + (1 << 33)), ValueError, "indptr: got 85899345"),
        (
            lambda: flashinfer.segment_packbits(x, indptr.view(1, 2)),
            ValueError,
            r"indptr: got shape \[1, 2\], wanted a vector",
        ),
        (
            lambda: flashinfer.segment_packbits(x, indptr[:0]),
            ValueError,
            r"indptr: got shape \[0\], wanted \[num_segments \+ 1\]",
        ),
        (lambda: flashinfer.segment_packbits(x.int(), indptr), TypeError, "x: got int32"),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("near", [False, True])
def test_indptr_of_any_integers_and_strides(dtype, near, device):
    x = torch.rand(30, device=device) < 0.5
    indptr = torch.tensor([0, 3, 3, 12, 30], dtype=torch.int32, device=device)
    other = indptr.to(dtype).repeat_interleave(2)[::2]
    got = flashinfer.segment_packbits(x, other.cpu() if near else other)
    for one, want in zip(got, flashinfer.segment_packbits(x, indptr), strict=True):
        assert one.dtype == want.dtype and torch.equal(one, want)
