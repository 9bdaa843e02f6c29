"""Calls of the fused operators of diffusion models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashinfer.diffusion_ops import fused_qk_rmsnorm_rope

from ..support.cases import Case, Cases

SIZES = dict(num_frame_channels=24, num_height_channels=20, num_width_channels=20, head_dim=64)
HEADS = dict(num_heads_q=2, num_heads_k=1, num_heads_v=1)


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    qkv, weights = torch.randn(12, 256, device=device).bfloat16(), torch.randn(192, device=device).bfloat16()
    outputs = [torch.zeros(12, heads, 64, dtype=torch.bfloat16, device=device) for heads in (2, 1, 1)]
    eight = [one.to(torch.float8_e4m3fn) for one in outputs]
    numbers = (3, 2, 2, 24, 20, 20, 1e-6, 1e4)
    inputs = (qkv, weights[:128], weights[128:])
    return {
        "fused_qk_rmsnorm_rope": [
            (*inputs, *outputs, *numbers, True, True, 1.0, 1.0),
            (*inputs, *eight, *numbers, False, False, 0.5, 2.0),
        ]
    }


def functions(device: str) -> dict[str, Case]:
    def inputs(n: int) -> dict[str, Any]:
        shapes = {"qkv": (n, 4, 256), "q_weight": (128,), "k_weight": (64,)}
        return {name: torch.randn(shape, device=device).bfloat16() for name, shape in shapes.items()}

    function = partial(fused_qk_rmsnorm_rope, ppf=1, pph=2, ppw=2, **SIZES, **HEADS)
    return {"fused_qk_rmsnorm_rope": Case(function, inputs)}


CASES = Cases(operators, functions)
