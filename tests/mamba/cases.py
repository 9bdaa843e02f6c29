"""Calls of Mamba's step for tests of what holds for every family."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer import mamba

from ..support.cases import Case, Cases


def arguments(device: str, batch: int) -> dict[str, Any]:
    """One token of each sequence; the last two dimensions of the decays are expanded, as Mamba-2 has them."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    return dict(
        state=randn(batch + 1, 4, 18, 24),
        x=randn(batch, 4, 18),
        dt=randn(batch, 4, 1).expand(batch, 4, 18),
        A=-torch.rand(4, 1, 1, device=device).expand(4, 18, 24),
        B=randn(batch, 2, 24),
        C=randn(batch, 2, 24),
        D=randn(4, 1).expand(4, 18),
        dt_bias=randn(4, 1).expand(4, 18),
    )


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    tensors = arguments(device, 9)
    state, D, dt_bias = (tensors.pop(name) for name in ("state", "D", "dt_bias"))
    tokens = {name: one if name == "A" else one.unsqueeze(1) for name, one in tensors.items()}
    slots, accepted = torch.randperm(10, device=device).view(5, 2), torch.full((5,), 2, device=device)
    offsets, packed = torch.tensor([0, 2, 3, 3, 7, 9], device=device), {}
    packed = {name: one if name == "A" else one.unsqueeze(0) for name, one in tensors.items()}
    history = torch.zeros(10, 3, 4, 18, 24, device=device)
    x, more = tokens["x"], (D, None, dt_bias, True)
    return {
        "selective_state_update": [
            (state, *tokens.values(), *more, None, None, -1, torch.empty_like(x), True, *[None] * 3, 10, *[None] * 4),
            (
                *(state, *packed.values(), D, packed["x"] * 2, None, False, slots, None, -1),
                *(torch.empty_like(packed["x"]), False, history, None, None, 10, offsets, accepted, None, None),
            ),
            (
                *((state * 9).short(), *tokens.values(), *more, None, None, -1, torch.empty_like(x), True),
                *((history * 9).short(), None, None, 10, None, None),
                *(torch.ones(10, 4, 18, device=device), torch.ones(10, 3, 4, 18, device=device)),
            ),
        ]
    }


def functions(device: str) -> dict[str, Case]:
    def inputs(batch: int) -> dict[str, Any]:
        """Contiguous: a replay's inputs are written to."""
        return {name: one.contiguous() for name, one in arguments(device, batch).items()}

    return {"selective_state_update": Case(mamba.selective_state_update, inputs, (), (), ("state",))}


CASES = Cases(operators, functions)
