"""Oracles of samples and filters: Philox in integers, sorted thresholds and CDF intervals in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MASK = 2**32 - 1


def philox4x32_10(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Compute Philox as in Salmon et al. 2011, written from the paper."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second & _MASK,
            (first >> 32) ^ d ^ high,
            first & _MASK,
        )
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return a, b, c, d


def uniform(seed: int, offset: int, row: int, draw: int = 0) -> float:
    """Return a number in [0, 1) with 53 bits for key ``seed`` and counter (``offset``, ``row``, ``draw``)."""
    seed, offset = seed % 2**64, offset % 2**64
    words = philox4x32_10((offset & _MASK, offset >> 32, row & _MASK, draw), (seed & _MASK, seed >> 32))
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Filters:
    """Parameters of one output."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    top_k_first: bool = False


def top_k_threshold(x: torch.Tensor, k: int) -> float:
    """Return the threshold of numbers of any sign, or -inf if all are kept."""
    real = x[~x.isnan()]
    if k < 0 or k >= len(x) or len(real) < max(k, 1):
        return -float("inf")
    return float(real.sort(descending=True).values[max(k, 1) - 1])


def top_p_thresholds(x: torch.Tensor, p: float, error: float) -> list[float]:
    """Return the largest v with sum(x >= v) >= p * S, and its neighbours that rounding may choose."""
    if p >= 1:
        return [0.0]
    values = x.sort(descending=True).values
    if p <= 0:
        return [float(values[0])]
    mass = values.cumsum(0)
    wanted, most = p * mass[-1], len(values) - 1
    first = min(int(torch.searchsorted(mass, wanted - error)), most)
    last = min(int(torch.searchsorted(mass, wanted + error)), most)
    return sorted(set(values[first : last + 1].tolist()))


def thresholds(x: torch.Tensor, filters: Filters, error: float) -> tuple[torch.Tensor, list[float]]:
    """Return the numbers to draw from, in float64, and the possible thresholds."""
    x = torch.where(x > 0, x, 0.0)
    least = max(0.0, top_k_threshold(x, filters.top_k))
    if filters.min_p > 0:
        top = x.max()
        least = max(least, float(top if filters.min_p >= 1 else (torch.tensor(filters.min_p).float() * top.float())))
    if filters.top_k_first:
        x = torch.where(x >= least, x, 0.0)
        x, least = x / x.sum(), 0.0
    return x, [max(least, t) for t in top_p_thresholds(x, filters.top_p, error * float(x.sum()))]


def is_sample(x: torch.Tensor, u: float, got: int, filters: Filters, error: float) -> bool:
    """Return whether ``got`` is, but for rounding, the smallest i with sum(kept x_j, j <= i) > u * sum(kept)."""
    x, cuts = thresholds(x.double().cpu(), filters, error)
    if not 0 <= got < len(x) or x[got] <= 0:
        return False
    slack = error * float(x.sum())
    if filters.top_k_first:  # numbers are normalised afterwards, which may make float neighbours equal
        ties = [x[(x - cut).abs() <= 2.5e-7 * cut] for cut in cuts]
        cuts = sorted({*cuts, *(value for tied in ties for value in tied.tolist())})
    for cut in cuts:
        kept = torch.where(x >= cut, x, 0.0)
        mass = kept.cumsum(0)
        target = u * float(mass[-1])
        before = float(mass[got - 1]) if got else 0.0
        if kept[got] > 0 and before - slack <= target < float(mass[got]) + slack:
            return True
    return False


def rows_of(kind: str, n: int, vocab_size: int) -> torch.Tensor:
    """Return rows x >= 0 in float32 that test different paths, normalised only if the kind says so."""
    noise = torch.randn(n, vocab_size)
    if kind == "flat":
        return torch.rand(n, vocab_size)
    if kind == "normal":
        return torch.softmax(noise, -1)
    if kind == "peaked":
        return torch.softmax(5 * noise, -1)
    if kind == "zipf":
        return (torch.argsort(noise, -1) + 1.0).pow(-1.2)
    if kind == "sorted":
        return torch.softmax(3 * noise.sort(-1, descending=True).values, -1)
    if kind == "equal":
        return torch.full((n, vocab_size), 0.37)
    if kind == "last":
        return torch.nn.functional.one_hot(torch.full((n,), vocab_size - 1), vocab_size).float()
    if kind == "ties":
        return torch.softmax(2 * noise, -1).bfloat16().float()
    if kind == "subnormal":
        return torch.rand(n, vocab_size) * 1e-39
    if kind == "holes":
        kept = torch.rand(n, vocab_size) < 0.1
        kept[:, -1] = True
        return torch.softmax(noise, -1) * kept
    raise ValueError(kind)


KINDS = ("flat", "normal", "peaked", "zipf", "sorted", "equal", "last", "ties", "subnormal", "holes")
