"""Calls of the gated norm for tests of what holds for every family."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn

EPS = 1e-5


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    def inputs(grad: bool = False) -> tuple[torch.Tensor, ...]:
        return tuple(randn(*shape, device=device, grad=grad) for shape in ((6, 64), (6, 64), (64,)))

    tensor = torch.full((), EPS, dtype=torch.float64, device=device)
    half = tuple(one.half() for one in inputs())
    return {
        "gated_rmsnorm": [(*half, EPS, 0, False, True), (*inputs(), EPS, 16, True, False)],
        "gated_rmsnorm_autograd": [
            (*inputs(True), EPS, None, 0, True, True),
            (*inputs(True), 0.0, tensor, 32, False, False),
        ],
        "gated_rmsnorm_backward": [
            (half[0].clone(), *half, EPS, None, 16, False, True),
            (randn(6, 64, device=device), *inputs(), 0.0, tensor, 0, True, False),
        ],
    }


def functions(device: str) -> dict[str, Case]:
    def rows(count: int) -> dict[str, Any]:
        given = dict(input=(count, 24), gate=(count, 24), weight=(24,))
        return {name: randn(*shape, device=device) for name, shape in given.items()}

    return {"gated_rmsnorm": Case(flashinfer.gated_rmsnorm, rows, ("eps",), ("input", "gate", "weight"))}


CASES = Cases(operators, functions)
