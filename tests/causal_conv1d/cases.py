"""Calls of the causal convolution for tests of what holds for every family."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    def inputs(grad: bool = False) -> tuple[Any, ...]:
        shapes = ((2, 9, 24), (24, 4), (24,), (2, 24, 3))
        return (*(randn(*shape, device=device, grad=grad) for shape in shapes), None)

    def packed(grad: bool = False) -> tuple[Any, ...]:
        x, weight = randn(1, 9, 24, device=device, grad=grad), randn(24, 2, device=device, grad=grad)
        return x, weight, None, None, torch.tensor([0, 4, 4, 9], device=device)

    rows, pool = randn(2, 24, 1, device=device), randn(5, 24, 4, device=device)
    slots, times = torch.tensor([3, -1], device=device), torch.tensor([6, 1], device=device)
    out, states = randn(2, 9, 24, device=device), randn(2, 24, 3, device=device)
    return {
        "causal_conv1d": [(*inputs(), True, True), (*packed(), False, False)],
        "causal_conv1d_autograd": [(*inputs(True), True, True), (*packed(True), True, False)],
        "causal_conv1d_backward": [(out, states, *inputs(), True), (out[:1].clone(), None, *packed(), False)],
        "causal_conv1d_update": [
            (rows, pool, randn(24, 4, device=device), None, None, slots, -1, True),
            (rows, pool[:2].clone(), randn(24, 3, device=device), randn(24, device=device), times, None, -1, False),
        ],
    }


def functions(device: str) -> dict[str, Case]:
    def sequences(tokens: int) -> dict[str, Any]:
        given = dict(x=(tokens, 24, 9), weight=(24, 4), bias=(24,), initial_states=(tokens, 24, 3))
        return {name: randn(*shape, device=device) for name, shape in given.items()}

    def step(tokens: int) -> dict[str, Any]:
        given = dict(x=(tokens, 24), conv_state=(tokens, 24, 3), weight=(24, 4), bias=(24,))
        return {name: randn(*shape, device=device) for name, shape in given.items()}

    def activated(**given: Any) -> Any:
        return flashinfer.causal_conv1d_fn(**given, return_final_states=True, activation="silu")

    return {
        "causal_conv1d_fn": Case(activated, sequences, (), ("x", "weight", "bias", "initial_states")),
        "causal_conv1d_update": Case(flashinfer.causal_conv1d_update, step, (), (), ("conv_state",)),
    }


CASES = Cases(operators, functions)
