"""Grouped GEMM in float64, and inputs with exact products."""

from __future__ import annotations

import torch

from ..support.oracle import ulp

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SENTINEL = 7.0


def drawn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def integers(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return numbers whose sums of a few thousand products are exact in every accumulator."""
    return torch.randint(-1, 3, shape, device=device).float().to(dtype)


def spread(scale: torch.Tensor, each: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return a scale for each element of a matrix, in float64."""
    for dim, count in ((-2, each[0]), (-1, each[1])):
        scale = scale.repeat_interleave(count, dim)
    return scale[..., : shape[-2], : shape[-1]].double()


def scaled(x: torch.Tensor, scale: torch.Tensor | None, each: tuple[int, int]) -> torch.Tensor:
    return x.double() if scale is None else x.double() * spread(scale, each, tuple(x.shape))


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a @ b.T`` in float64, and the product of the magnitudes."""
    return a @ b.transpose(-1, -2), a.abs() @ b.abs().transpose(-1, -2)


def assert_product(
    got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, groups: int = 1
) -> None:
    """Check that ``got`` is ``want`` rounded once, except for errors of the sums.

    Tensor cores truncate sums. Hopper's 8-bit ones keep 13 bits of the largest of 32 products and of the previous
    sum: each of the 33 terms loses up to 2**-13 of that, half of it on average. The largest of 32 products of normal
    numbers is an eighth of their sum and seldom a fourth: together 33 / 4 * 2**-14, about 2**-11.
    """
    share = 2**-11 if dtype in FP8 and got.is_cuda else 2**-20
    bound = ulp(want, got.dtype) / 2 * 1.001 + share * magnitude * groups
    error = (got.double() - want).abs()
    assert got.shape == want.shape and bool((error <= bound).all()), f"off by {(error - bound).max()}"
