"""The rope family against float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer

from ..support.oracle import Guarded, assert_close, filled

INDEX_DTYPES = [torch.int32, torch.int64]

# tokens, heads of q, heads of k, head_dim, rotary_dim (None: all)
SHAPES = [
    (1, 1, 1, 2, None),
    (7, 8, 2, 128, None),
    (5, 4, 4, 64, 32),
    (3, 40, 8, 128, 64),
    (67, 3, 1, 80, 20),
    (4, 2, 3, 33, 6),
    (9, 5, 0, 96, None),
    (300, 2, 1, 64, None),
    (2, 130, 1, 256, None),
    (3, 1, 1, 512, None),
    (3, 2, 2, 576, 64),
    (2, 2, 2, 16, 0),
    (0, 4, 2, 64, None),
]


def quarter_frequencies(
    rotary_dim: int, scale: float, theta: float, llama31: tuple[float, float, int] | None = None
) -> torch.Tensor:
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    if llama31 is None:
        return frequencies / scale
    low, high, context = llama31
    turns = context * frequencies / (2 * math.pi)
    kept = (turns >= high).double() if low == high else ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scale


def rotate_oracle(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` rotated, and the sums of the magnitudes of the terms."""
    x = x.cpu().double()
    half = cos.shape[-1]
    cos, sin = cos.cpu().double()[:, None], sin.cpu().double()[:, None]
    first = slice(0, 2 * half, 2) if interleave else slice(0, half)
    second = slice(1, 2 * half, 2) if interleave else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    want, terms = x.clone(), x.abs()
    want[..., first], want[..., second] = a * cos - b * sin, b * cos + a * sin
    terms[..., first], terms[..., second] = (a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()
    return want, terms


def rope_oracle(x, positions, frequencies, interleave):
    angles = positions.cpu().double()[:, None] * frequencies
    return rotate_oracle(x, angles.cos(), angles.sin(), interleave)


def guarded(source: torch.Tensor, device: str, padded: bool) -> Guarded:
    copy = Guarded(tuple(source.shape), source.dtype, device, padded)
    copy.tensor.copy_(source)
    return copy


def check_both(function, in_place, q, k, want, device, padded, *arguments, **options):
    """Compare a function and its form in place with the oracle; inputs and margins stay."""
    before = q.clone(), k.clone()
    results = function(q, k, *arguments, **options)
    for got, source, (value, terms) in zip(results, before, want, strict=True):
        assert got.is_contiguous() and got.shape == source.shape
        assert_close(got, value, terms)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    q_in_place, k_in_place = guarded(q, device, padded), guarded(k, device, not padded)
    assert in_place(q_in_place.tensor, k_in_place.tensor, *arguments, **options) is None
    for got, same in zip((q_in_place, k_in_place), results, strict=True):
        assert torch.equal(got.tensor, same)
        got.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
def test_pos_ids(shape, padded, interleave, dtype, device):
    nnz, q_heads, k_heads, head_dim, rotary_dim = shape
    q, k = (
        filled((nnz, q_heads, head_dim), dtype, device, padded),
        filled((nnz, k_heads, head_dim), dtype, device, not padded),
    )
    pos_ids = torch.randint(-100, 5000, (nnz,), dtype=random.choice(INDEX_DTYPES))
    options = dict(rotary_dim=rotary_dim, interleave=interleave, rope_scale=1.7, rope_theta=3e4)
    frequencies = quarter_frequencies(head_dim if rotary_dim is None else rotary_dim, 1.7, 3e4)
    want = [rope_oracle(x, pos_ids, frequencies, interleave) for x in (q, k)]
    check_both(
        flashinfer.apply_rope_pos_ids,
        flashinfer.apply_rope_pos_ids_inplace,
        q,
        k,
        want,
        device,
        padded,
        pos_ids.to(device),
        **options,
    )


@pytest.mark.parametrize("lengths", [[5], [1] * 9, [0, 3, 0, 0, 17, 1, 0], [], [0], [100, 1, 61]], ids=str)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("index", INDEX_DTYPES, ids=["int32", "int64"])
def test_requests(lengths, padding, index, dtype, device):
    nnz = sum(lengths) + padding
    q, k = filled((nnz, 4, 64), dtype, device, True), filled((nnz, 2, 64), dtype, device, False)
    indptr = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=index)
    offsets = torch.randint(0, 1000, (len(lengths),), dtype=index)
    positions = torch.tensor([int(offsets[r]) + j for r, n in enumerate(lengths) for j in range(n)] + [0] * padding)
    want = [rope_oracle(x, positions, quarter_frequencies(64, 1.0, 1e4), False) for x in (q, k)]
    places = indptr.to(device), offsets.to(device)
    check_both(flashinfer.apply_rope, flashinfer.apply_rope_inplace, q, k, want, device, True, *places)
    frequencies = quarter_frequencies(64, 8.0, 5e5, (1, 4, 8192))
    want = [rope_oracle(x, positions, frequencies, False) for x in (q, k)]
    check_both(flashinfer.apply_llama31_rope, flashinfer.apply_llama31_rope_inplace, q, k, want, device, True, *places)


@pytest.mark.parametrize("llama31", [(1.0, 4.0, 8192), (2.0, 2.0, 4096), (0.5, 32.0, 777)], ids=str)
@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
def test_llama31(llama31, interleave, dtype, device):
    q, k = filled((50, 4, 128), dtype, device, False), filled((50, 1, 128), dtype, device, True)
    pos_ids = torch.randint(0, 131072, (50,), dtype=torch.int32)
    low, high, context = llama31
    options = dict(
        interleave=interleave, rope_scale=32.0, low_freq_factor=low, high_freq_factor=high, old_context_len=context
    )
    want = [rope_oracle(x, pos_ids, quarter_frequencies(128, 32.0, 5e5, llama31), interleave) for x in (q, k)]
    function, in_place = flashinfer.apply_llama31_rope_pos_ids, flashinfer.apply_llama31_rope_pos_ids_inplace
    check_both(function, in_place, q, k, want, device, False, pos_ids.to(device), **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_cos_sin_cache(shape, padded, is_neox, dtype, device):
    nnz, q_heads, k_heads, head_dim, rotary_dim = shape
    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    q, k = (
        filled((nnz, q_heads * head_dim), dtype, device, padded),
        filled((nnz, k_heads * head_dim), dtype, device, not padded),
    )
    positions = torch.randint(0, 40, (nnz,), dtype=random.choice(INDEX_DTYPES))
    cache = filled((40, 2 * half), torch.float32, device, padded)
    cos, sin = cache.cpu()[positions.long()].split(half, -1) if half else (torch.empty(nnz, 0), torch.empty(nnz, 0))
    want = [
        rotate_oracle(x.unflatten(1, (heads, head_dim)), cos, sin, not is_neox)
        for x, heads in ((q, q_heads), (k, k_heads))
    ]
    flat = [(value.flatten(1), terms.flatten(1)) for value, terms in want]

    def function(q, k):
        return flashinfer.apply_rope_with_cos_sin_cache(positions.to(device), q, k, head_dim, cache, is_neox)

    def in_place(q, k):
        return flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions.to(device), q, k, head_dim, cache, is_neox=is_neox
        )

    check_both(function, in_place, q, k, flat, device, padded)
    if not padded:
        check_both(
            function,
            in_place,
            q.unflatten(1, (q_heads, head_dim)),
            k.unflatten(1, (k_heads, head_dim)),
            want,
            device,
            padded,
        )


def test_positions_up_to_a_million(dtype, device):
    """Use angles of 1e6 radians: float32 products would be wrong in the second digit."""
    q, k = filled((2000, 1, 128), dtype, device, False), filled((2000, 1, 128), dtype, device, False)
    pos_ids = torch.cat(
        [torch.randint(900_000, 1_000_001, (1999,), dtype=torch.int32), torch.tensor([2**24 + 1], dtype=torch.int32)]
    )
    want = [rope_oracle(x, pos_ids, quarter_frequencies(128, 1.0, 1e4), False) for x in (q, k)]
    # The rounding of the angle in float64, 1e-9, shows if all terms are near zero.
    terms = [
        (value, terms + x.cpu().double().norm(dim=-1, keepdim=True) * 0.01)
        for (value, terms), x in zip(want, (q, k), strict=True)
    ]
    check_both(
        flashinfer.apply_rope_pos_ids,
        flashinfer.apply_rope_pos_ids_inplace,
        q,
        k,
        terms,
        device,
        False,
        pos_ids.to(device),
    )


def test_every_quarter_of_a_turn(device):
    """Check cosines and sines on both sides of every multiple of an eighth turn."""
    eighths = torch.arange(-40, 41, dtype=torch.float64)
    q = torch.zeros(len(eighths) * 3, 1, 2, device=device)
    q[..., 0] = 1
    pos_ids = torch.arange(len(q), dtype=torch.int32) - 120
    for theta, step in ((1.0, math.pi / 12), (1.0, math.pi / 4 + 1e-4)):
        got, _ = flashinfer.apply_rope_pos_ids(q, q[:, :0], pos_ids.to(device), rope_scale=1 / step, rope_theta=theta)
        angles = pos_ids.double() / (1 / step)
        assert_close(got[:, 0, 0], angles.cos(), torch.full_like(angles, 1e-6))
        assert_close(got[:, 0, 1], angles.sin(), torch.full_like(angles, 1e-6))


@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
def test_parts_of_a_fused_projection_in_place(interleave, dtype, device):
    qkv = filled((11, 8 * 128), dtype, device, True)
    before = qkv.clone()
    pos_ids = torch.arange(11, dtype=torch.int32)
    q, k = qkv[:, : 4 * 128].unflatten(1, (4, 128)), qkv[:, 4 * 128 : 6 * 128].unflatten(1, (2, 128))
    want = [rope_oracle(x, pos_ids, quarter_frequencies(128, 1.0, 1e4), interleave) for x in (q, k)]
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids.to(device), interleave=interleave)
    for got, (value, terms) in zip((q, k), want, strict=True):
        assert_close(got, value, terms)
    assert torch.equal(qkv[:, 6 * 128 :], before[:, 6 * 128 :])
    flat = [x.flatten(1) if x.is_contiguous() else qkv[:, s] for x, s in ((q, slice(0, 512)), (k, slice(512, 768)))]
    cache = torch.cat([torch.ones(11, 64), torch.zeros(11, 64)], 1).to(device)
    before = qkv.clone()
    flashinfer.apply_rope_with_cos_sin_cache_inplace(pos_ids.to(device), *flat, 128, cache, not interleave)
    assert torch.equal(qkv, before)


def test_heads_before_tokens(dtype, device):
    q, k = (
        filled((4, 9, 64), dtype, device, False).transpose(0, 1),
        filled((3, 9, 64), dtype, device, True).transpose(0, 1),
    )
    pos_ids = torch.arange(9, dtype=torch.int64)
    want = [rope_oracle(x, pos_ids, quarter_frequencies(64, 1.0, 1e4), True) for x in (q, k)]
    for got, (value, terms) in zip(
        flashinfer.apply_rope_pos_ids(q, k, pos_ids.to(device), interleave=True), want, strict=True
    ):
        assert_close(got, value, terms)
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids.to(device), interleave=True)
    assert_close(q, *want[0])
    assert_close(k, *want[1])
