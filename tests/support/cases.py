"""Sample calls of a family with random inputs, for tests that cover every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A public function, its arguments for a number of tokens, and the numbers that users vary.

    Sizes are distinct and not 1, because torch merges sizes that are equal on the first call and specialises
    1.
    """

    function: Callable[..., Any]
    arguments: Callable[[int], dict[str, Any]]
    numbers: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


def none(device: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Cases:
    """``CASES`` of a family for a device.

    ``operators``: name -> arguments, once or more. Tensors of differentiable operators require gradients.
    ``functions``: name -> a call. ``trained``: functions and wrappers of attention that are tested in a
    program of their own.
    """

    operators: Callable[[str], dict[str, list[tuple[Any, ...]]]] = none
    functions: Callable[[str], dict[str, Case]] = none
    trained: Callable[[str], dict[str, Case]] = none


def randn(*shape: int, device: str, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=device, requires_grad=grad)


def values(number: str, count: int) -> list[float]:
    """Return distinct values of a number that users vary."""
    if number in ("page_size", "block_size", "stride_block", "stride_n"):
        return [4 + i for i in range(count)]
    if number in ("seed", "offset", "top_k", "k"):
        return [3 + i for i in range(count)]
    if number in ("top_p", "min_p"):
        return [0.1 + i / (2 * count) for i in range(count)]
    start = {"eps": 1e-6, "old_context_len": 1000, "high_freq_factor": 4.5, "low_freq_factor": 0.5, "rope_theta": 1e4}
    step = {"eps": 1e-4, "old_context_len": 10, "rope_theta": 123.0}
    return [start.get(number, 1.5) + i * step.get(number, 0.25) for i in range(count)]
