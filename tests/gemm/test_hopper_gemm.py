"""Sizes and layouts that reach each part of the Hopper kernels; other devices run theirs."""

from __future__ import annotations

import pytest
import torch

from flashinfer._gemm.operators import grouped_gemm
from flashinfer.gemm import SegmentGEMMWrapper
from flashinfer.utils import is_sm90a_supported

from .oracle import SENTINEL, assert_product, drawn, product, scaled

# Rows of a group: each padded size of a tile, and groups of several tiles.
SIZES = [1, 16, 0, 17, 32, 33, 64, 90, 128, 130, 160, 161, 200, 224, 230, 256, 257, 330, 513]
HALVES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def arch_of(device: str) -> int:
    """Return the arch that the device's kernels must have: 90 on Hopper, else any."""
    return 90 if device == "cuda" and is_sm90a_supported(torch.device(device)) else 0


@pytest.mark.parametrize("more", [[], [0] * 100, [2500]])
@pytest.mark.parametrize("n", [136, 388])
@pytest.mark.parametrize("by_depth", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_size_of_a_tile(dtype, by_depth, n, more, device):
    """Store outputs in whole lines and one by one, with strips that end inside a CTA or a cluster.

    The mean of the groups' rows selects the kernel for many, some or few tokens.
    """
    if dtype.itemsize == 1 and not by_depth:
        pytest.skip("fp8 matrices are contiguous along k")
    sizes = [*SIZES[torch.randint(0, 3, ()) :], *more]
    m, k = sum(sizes) + 5, 208
    indptr = torch.tensor([0, *sizes]).cumsum(0).to(device)
    a, b = drawn(m, k, dtype=dtype, device=device), drawn(len(sizes), n, k, dtype=dtype, device=device)
    if not by_depth and n % 8 == 0:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    rows = sum(sizes)
    parts = [product(x.double(), y.double()) for x, y in zip(a[:rows].split(sizes), b, strict=True)]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    for out_dtype in (torch.bfloat16 if dtype.itemsize == 1 else dtype, torch.float32):
        buffer = torch.full((m, n + 8), SENTINEL, device=device, dtype=out_dtype)
        out = buffer[:, :n]
        grouped_gemm(out, a, b, None, None, indptr, *[None] * 4, 0, 0, 0, arch=arch_of(device))
        assert_product(out[:rows], want, magnitude, dtype)
        assert bool((out[rows:] == SENTINEL).all() and (buffer[:, n:] == SENTINEL).all())


@pytest.mark.parametrize("more", [[], [0] * 20, [900]])
@pytest.mark.parametrize("dtype", HALVES)
def test_gathered_rows(dtype, more, device):
    """Gather rows once, several times and never; scales are gathered with their rows."""
    m, n, k, sizes = 150, 200, 336, [70, 1, 0, 270, 30, *more]
    a, b = drawn(m, k, dtype=dtype, device=device), drawn(len(sizes), n, k, dtype=dtype, device=device)
    rows = torch.randint(0, m, (sum(sizes),), device=device)
    indptr = torch.tensor([0, *sizes], device=device).cumsum(0)
    scales = (None, None, *(0, 0, 0)) if dtype.itemsize > 1 else (torch.rand(m, 3, device=device) + 0.5, torch.ones(len(sizes), 2, 3, device=device), 1, 128, 128)  # fmt: skip
    taken = a[rows].double()
    if scales[0] is not None:
        taken *= scales[0][rows].repeat_interleave(128, 1)[:, :k].double()
    parts = [product(x, y.double()) for x, y in zip(taken.split(sizes), b, strict=True)]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    places = rows.int()
    places[5], places[100] = -1, m
    want[5] = want[100] = magnitude[5] = magnitude[100] = 0
    out = torch.full((sum(sizes), n), SENTINEL, device=device)
    grouped_gemm(out, a, b, *scales[:2], indptr, None, None, places, None, *scales[2:], arch=arch_of(device))
    assert_product(out, want, magnitude, dtype)


@pytest.mark.parametrize("mode", ["MN", "K"])
@pytest.mark.parametrize("depth", [96, 128 * 3, 128 * 8, 128 * 17 + 32])
@pytest.mark.parametrize("granularity", [(1, 128, 128), (128, 128, 256), (1, 1, 128)])
def test_factors_of_many_tokens(granularity, depth, mode, device):
    """Use full, partial and single panels of factors, with tokens and weights that end inside a tile.

    One kernel serves weights with one factor each, another strips that share a factor.
    """
    (gm, gn, gk), dtype = granularity, torch.float8_e4m3fn
    for m, n in ((161, 72), (300, 264)):
        a, b = drawn(m, depth, dtype=dtype, device=device), drawn(1, n, depth, dtype=dtype, device=device)
        a_scale = torch.rand(-(-m // gm), -(-depth // gk), device=device) + 0.25
        b_scale = torch.rand(1, -(-n // gn), -(-depth // gk), device=device) + 0.25
        want, magnitude = product(scaled(a, a_scale, (gm, gk)), scaled(b[0], b_scale[0], (gn, gk)))
        if mode == "MN":
            a_scale, b_scale = (x.mT.contiguous().mT for x in (a_scale, b_scale))
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            buffer = torch.full((m + 2, n + 8), SENTINEL, device=device, dtype=out_dtype)
            out = buffer[1:-1, :n]
            grouped_gemm(out, a, b, a_scale, b_scale, *[None] * 5, *granularity, arch=arch_of(device))
            assert_product(out, want, magnitude, dtype)
            assert bool((buffer[[0, -1]] == SENTINEL).all() and (buffer[:, n:] == SENTINEL).all())


def test_more_tiles_than_blocks(device):
    """Run persistent CTAs over many tiles, and strips of many token tiles."""
    m, n, k = (5000, 3200, 72) if device == "cuda" else (700, 300, 72)
    a, b = (drawn(*size, dtype=torch.bfloat16, device=device) for size in ((m, k), (2, n, k)))
    indptr = torch.tensor([0, m - 260, m], device=device)
    out = torch.full((m, n), SENTINEL, device=device, dtype=torch.bfloat16)
    grouped_gemm(out, a, b, None, None, indptr, *[None] * 4, 0, 0, 0)
    parts = [product(x.double(), y.double()) for x, y in zip(a.split([m - 260, 260]), b, strict=True)]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    assert_product(out, want, magnitude, torch.bfloat16)


@pytest.mark.parametrize("granularity_n", [1, 128])
def test_factors_of_steps_and_of_two_steps(granularity_n, device):
    """Use factors of rows and of weight blocks, for 128 and for 256 elements of k."""
    m, n, k = 333, 264, 640
    a, b = (drawn(*size, dtype=torch.float8_e4m3fn, device=device) for size in ((m, k), (2, n, k)))
    for depth in (128, 256):
        blocks = -(-k // depth)
        a_scale = torch.rand(blocks, m, device=device).t() + 0.5
        b_scale = torch.rand(2, -(-n // granularity_n), blocks, device=device) + 0.5
        out = torch.full((m, n), SENTINEL, device=device, dtype=torch.bfloat16)
        indptr = torch.tensor([0, 70, m], device=device)
        grouped_gemm(out, a, b, a_scale, b_scale, indptr, *[None] * 4, 1, granularity_n, depth, arch=arch_of(device))
        x = a.double() * a_scale.repeat_interleave(depth, 1)[:, :k].double()
        y = b.double() * b_scale.repeat_interleave(depth, 2)[:, :, :k].repeat_interleave(granularity_n, 1)[:, :n]
        parts = [product(rows, matrix) for rows, matrix in zip(x.split([70, m - 70]), y, strict=True)]
        want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
        assert_product(out, want, magnitude, torch.float8_e4m3fn)


def test_backends_refuse_calls_that_hopper_cannot_serve(device):
    x, weights = (drawn(*size, dtype=torch.float32, device=device) for size in ((5, 16), (1, 8, 16)))
    wrapper = SegmentGEMMWrapper(torch.empty(8, device=device), backend="sm90")
    lens = torch.tensor([5])
    reason = "operands are neither bfloat16" if device == "cuda" else "for tensors on the CPU"
    with pytest.raises(ValueError, match=f"backend: got 'sm90'.*{reason}"):
        wrapper.run(x, weights, 1, True, seg_lens=lens)
    if device == "cuda":
        halves = torch.ones(5, 17, device=device).bfloat16(), torch.ones(1, 8, 17, device=device).bfloat16()
        with pytest.raises(ValueError, match="rows do not begin at multiples of 16 bytes"):
            wrapper.run(*halves, 1, True, seg_lens=lens)
