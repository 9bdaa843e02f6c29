"""Thresholds of top-p against the rounded sums that define them."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling


def chunk_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of 512 elements in the order of common/fixed_sum.h."""
    chunks = -(-x.shape[1] // 512)
    v = torch.nn.functional.pad(x, (0, chunks * 512 - x.shape[1])).view(len(x), chunks, 512)
    while v.shape[-1] > 1:
        v = v[..., : v.shape[-1] // 2] + v[..., v.shape[-1] // 2 :]
    return v[..., 0]


def rows_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    noise = torch.randn(rows, vocab_size)
    if kind == "levels":
        return torch.where(noise > 0, 0.3, 0.11) * 1e-3
    if kind == "one and dust":
        dust = torch.rand(rows, vocab_size) * 1e-7
        return dust.scatter(1, torch.randint(vocab_size, (rows, 1)), 1.0)
    if kind == "blocks":  # 1024 equal elements at a time: large or small
        scales = 3 * torch.randn(rows, vocab_size // 1024 + 1)
        noise += scales.repeat_interleave(1024, -1)[:, :vocab_size]
    x = torch.softmax(noise * 5 if kind == "peaked" else noise, -1)
    return x.sort(-1, descending=True).values if kind == "sorted" else x


@pytest.mark.parametrize("rows", [148, 16])
@pytest.mark.parametrize("kind", ["normal", "peaked", "blocks", "levels", "sorted", "one and dust"])
def test_thresholds_are_exact(kind, rows, dtype, device):
    """Compare with the largest element whose sum with all larger ones suffices."""
    given = rows_of(kind, rows, 33000).to(dtype)
    x, p = given.float().to(device), torch.rand(rows)
    p[::2] = 1 - p[::2] * 10.0 ** -torch.randint(1, 6, (len(p[::2]),))
    if kind == "levels":  # nearly the sum of the larger ones
        large = given.double() * (given == given.amax(1, keepdim=True))
        p[1::4] = (large.sum(1) / given.double().sum(1)).float()[1::4] * (1 + 2e-7 * torch.randn(len(p[1::4])))
    p = p.clamp(max=1 - 2**-24).to(device)
    kept = sampling.top_p_renorm_probs(given.to(device), p) > 0
    t = torch.where(kept, x, torch.inf).amin(1, keepdim=True)
    whole = chunk_sums(x).double()
    # A chunk's sum as an integer below 2^48.
    scale = 2.0 ** (48 - torch.frexp(whole.amax(1, keepdim=True)).exponent.double())

    def fixed(is_kept: torch.Tensor) -> torch.Tensor:
        return (chunk_sums(torch.where(is_kept, x, 0.0)).double() * scale).round().sum(1)

    wanted = p.double() * (whole * scale).round().sum(1)
    assert kept.equal(x >= t)
    assert (fixed(x >= t) >= wanted).all()
    assert (fixed(x > t) < wanted).all()
