"""Bounds of errors of the delta rule, by element type."""

from __future__ import annotations

import torch

from .oracle import error

PACKED = ["chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_delta_rule",
          "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]  # fmt: skip


# Relative errors of an output and of a state. Those of half types allow the rounding of every element.
BOUNDS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (4e-3, 1e-5),
    torch.float16: (5e-4, 1e-5),
}


def wide(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.detach().cpu().double() for name, one in given.items()}


def check(result, expected, dtype, rounded=None) -> None:
    """Compare with the oracle. ``rounded``: the bound per head if operands were rounded."""
    bounds = BOUNDS[dtype]
    if rounded is not None:
        bounds = rounded, rounded
        result, expected = ((o.transpose(1, 2), state) for o, state in (result, expected))
    for got, want, bound in zip(result, expected, bounds, strict=True):
        assert want.square().mean() > 1e-6
        assert error(got, want) < bound
