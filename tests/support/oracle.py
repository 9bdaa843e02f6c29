"""Comparisons: errors in units in the last place, bits of several runs, and writes outside a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of ``dtype`` at the magnitude of each (float64) value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs())
    size = torch.ldexp(torch.full_like(values, info.eps), exponent - 1)
    # frexp takes 0 for 1/2.
    return torch.where(values == 0, 0.0, size).clamp(min=info.smallest_normal * info.eps)


def rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest rounding error of a (float64) value in ``dtype``: half a unit in its last place.

    For subnormal numbers it is no share of the value: in float16, below 6e-5, it is 2**-25. A thousandth is
    added for values that earlier errors carried past a power of two.
    """
    return 1.001 / 2 * ulp(values, dtype)


def max_ulps(dtype: torch.dtype) -> float:
    """Return the project's error bound: 2 ulp of the half types, 4 of float32."""
    return 4.0 if dtype == torch.float32 else 2.0


def assert_close(
    got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | None = None, ulps: float | None = None
) -> None:
    """Check that ``got`` is within the bound of the float64 oracle ``want``. NaN never passes.

    ``scale`` is the magnitude of the terms of a sum. If they cancel, the error is measured relative to them.
    """
    assert want.dtype == torch.float64 and got.shape == want.shape, (got.shape, want.shape)
    want = want.to(got.device)
    magnitude = want.abs() if scale is None else torch.maximum(want.abs(), scale.to(got.device).abs())
    same = got.double() == want  # also for infinities
    error = torch.where(same, 0.0, (got.double() - want).abs() / ulp(magnitude, got.dtype))
    limit = max_ulps(got.dtype) if ulps is None else ulps
    bad = ~(error <= limit)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(f"{int(bad.sum())} of {bad.numel()} differ, first at {where}: got {got[where].item()}, "
                             f"wanted {want[where].item()}, {error[where].item():.2f} ulp, limit {limit}")  # fmt: skip


class Guarded:
    """A tensor inside a larger buffer full of a sentinel: ``padded`` rows, or the buffer itself.

    ``check()`` fails if anything outside the tensor was written. The tensor starts as NaN (123 for integers),
    so that an element that was not written is detected.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, padded: bool) -> None:
        *leading, last = shape
        self.sentinel = float("nan") if dtype.is_floating_point else 123
        pad = 16 if padded else 0
        self.buffer = torch.full((*leading, last + 2 * pad), self.sentinel, dtype=dtype, device=device)
        self.tensor = self.buffer[..., pad : pad + last]
        self.pad = pad

    def check(self) -> None:
        last = self.tensor.shape[-1]
        for margin in (self.buffer[..., : self.pad], self.buffer[..., self.pad + last :]):
            untouched = margin.isnan() if self.buffer.is_floating_point() else margin == self.sentinel
            assert bool(untouched.all()), "something was written outside the tensor"


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: str, padded: bool, scale: float = 1.0) -> torch.Tensor:
    """Return random normal values with the strides of :class:`Guarded`. The margins are NaN."""
    tensor = Guarded(shape, dtype, device, padded).tensor
    tensor.copy_(torch.randn(shape, dtype=torch.float32).mul_(scale).to(dtype))
    return tensor


def check_bits_for_any_threads(compute: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Check that results have the same bits with one, two and three threads as with all."""
    first, threads = list(compute()), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(compute(), first, strict=True))
    finally:
        torch.set_num_threads(threads)
