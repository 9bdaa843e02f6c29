"""Calls of mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashinfer import fused_moe

from ..support.cases import Case, Cases


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    logits, bias = torch.randn(9, 24, device=device), torch.randn(24, device=device)
    weights, ids = torch.empty(9, 3, device=device), torch.empty(9, 3, dtype=torch.int32, device=device)
    routed = torch.randint(0, 4, (9, 3), dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 10, 10, 17, 27], dtype=torch.int32, device=device)
    rows = torch.randperm(27, device=device).view(9, 3).int()
    h, numbers = torch.randn(27, 32, device=device), [torch.rand(4, device=device) for _ in range(3)]
    wide = torch.randn(4, 32, device=device)
    codes, factors = four_bits(4, 64, 128, device)
    half, product = torch.randn(9, 128, device=device).half(), torch.empty(27, 64, device=device).half()
    return {
        "moe_route": [(weights, ids, logits, None, 0, 1, 1, 1.0), (weights, ids.long(), logits, bias, 2, 4, 2, 2.5)],
        "moe_sort": [(routed, 4, 0), (routed.long(), 2, 2)],
        "moe_activate": [
            (h, bounds, 3, True, wide, *numbers, None, False),
            (h, None, 6, False, None, None, None, None, torch.tensor(2.0, device=device), False),
            (h, None, 9, False, None, None, None, None, None, True),
        ],
        "mxfp4_gemm": [
            (product, half, codes, factors, bounds, torch.randint(0, 9, (27,), dtype=torch.int32, device=device)),
            (product, half.repeat(3, 1), codes, factors, bounds, None),
        ],
        "moe_finalize": [
            (torch.empty(9, 32, device=device), h, rows, weights.uniform_(), wide, bounds),
            (torch.empty(9, 32, device=device).half(), h, rows, None, None, None),
        ],
    }


def four_bits(experts: int, rows: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of MXFP4 matrices in the kernels' form."""
    codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(117, 121, (experts, rows // 64, k // 128, 16, 16), dtype=torch.uint8, device=device)
    return codes, scales


def route(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    method = fused_moe.RoutingMethodType.DeepSeekV3
    return fused_moe.route(logits, 3, method, bias=bias, n_group=4, topk_group=2)


def deepseek(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(logits.shape[0], 3, device=logits.device)
    ids = torch.empty(logits.shape[0], 3, dtype=torch.int64, device=logits.device)
    fused_moe.fused_topk_deepseek(logits, bias, 4, 2, 3, 2.5, weights, ids)
    return weights, ids


def moe(**given: torch.Tensor) -> torch.Tensor:
    return fused_moe.cutlass_fused_moe(**given, output_dtype=torch.float32, quant_scales=None)[0]


def moe_mxfp4(scales: list[torch.Tensor], **given: torch.Tensor) -> torch.Tensor:
    return fused_moe.cutlass_fused_moe(
        **given, output_dtype=torch.bfloat16, quant_scales=scales, use_w4_group_scaling=True
    )[0]


def functions(device: str) -> dict[str, Case]:
    def logits(tokens: int) -> dict[str, Any]:
        return dict(logits=torch.randn(tokens, 24, device=device), bias=torch.randn(24, device=device))

    def layer(tokens: int) -> dict[str, Any]:
        return dict(
            input=torch.randn(tokens, 32, device=device),
            token_selected_experts=torch.randint(0, 4, (tokens, 3), dtype=torch.int32, device=device),
            token_final_scales=torch.rand(tokens, 3, device=device),
            fc1_expert_weights=torch.randn(4, 36, 32, device=device),
            fc2_expert_weights=torch.randn(4, 32, 18, device=device),
        )

    def mxfp4(tokens: int) -> dict[str, Any]:
        return dict(
            input=torch.randn(tokens, 128, device=device).bfloat16(),
            token_selected_experts=torch.randint(0, 4, (tokens, 3), dtype=torch.int32, device=device),
            token_final_scales=torch.rand(tokens, 3, device=device),
            fc1_expert_weights=first,
            fc2_expert_weights=second,
        )

    (first, first_scales), (second, second_scales) = four_bits(4, 512, 128, device), four_bits(4, 128, 256, device)
    with_scales = partial(moe_mxfp4, [first_scales, second_scales])
    return {
        "route": Case(route, logits),
        "fused_topk_deepseek": Case(deepseek, logits),
        "cutlass_fused_moe": Case(moe, layer),
        "cutlass_fused_moe quant_scales": Case(with_scales, mxfp4),
    }


CASES = Cases(operators, functions)
