"""Calls of activations and of their gradients."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x, out = randn(6, 64, device=device).half(), torch.empty(6, 32, device=device).half()
    xg = randn(6, 64, device=device, grad=True)
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name in ACTIVATIONS:
        calls[f"{name}_and_mul"] = [(x, None)]
        calls[f"{name}_and_mul_out"] = [(out.clone(), x, None)]
        calls[f"{name}_and_mul_autograd"] = [(xg, None)]
        calls[f"{name}_and_mul_backward"] = [(x[:, :32], x)]
    return calls


def functions(device: str) -> dict[str, Case]:
    def wide(n: int) -> dict[str, Any]:
        return dict(input=randn(n, 48, device=device))

    cases = {}
    for name in ACTIVATIONS:
        function, backward = getattr(flashinfer, f"{name}_and_mul"), getattr(flashinfer, f"{name}_and_mul_backward")
        cases[f"{name}_and_mul"] = Case(function, wide, differentiable=("input",))
        cases[f"{name}_and_mul out"] = Case(
            function,
            lambda n: wide(n) | dict(out=randn(n, 24, device=device)),
            differentiable=("input",),
            written=("out",),
        )
        cases[f"{name}_and_mul_backward"] = Case(
            backward, lambda n: wide(n) | dict(grad=randn(n, 24, device=device)), differentiable=("grad", "input")
        )
    return cases


CASES = Cases(operators, functions)
