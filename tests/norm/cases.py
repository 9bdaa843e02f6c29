"""Calls of normalisation and of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn

EPS = 1e-5


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x, w = randn(6, 64, device=device).half(), randn(64, device=device).half()
    xg, rg = randn(6, 64, device=device, grad=True), randn(6, 64, device=device, grad=True)
    wg, bg = randn(64, device=device, grad=True), randn(64, device=device, grad=True)
    tensor = torch.full((), EPS, dtype=torch.float64, device=device)
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name in ("rmsnorm", "gemma_rmsnorm"):
        calls[name] = [(x, w, EPS, None)]
        calls[f"{name}_out"] = [(x.clone(), x, w, EPS, None)]
        calls[f"{name}_autograd"] = [(xg, wg, EPS, None, None), (xg, wg, 0.0, tensor, None)]
    for name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"):
        calls[name] = [(x.clone(), x.clone(), w, EPS, None)]
        calls[f"{name}_autograd"] = [(xg, rg, wg, EPS, None, None), (xg, rg, wg, 0.0, tensor, None)]
    calls["layernorm"] = [(x, w, w, EPS)]
    calls["layernorm_out"] = [(x.clone(), x, w, w, EPS)]
    calls["layernorm_autograd"] = [(xg, wg, bg, EPS, None), (xg, wg, bg, 0.0, tensor)]
    eight, scale = torch.empty(6, 64, dtype=torch.float8_e4m3fn, device=device), torch.full((1,), 0.5, device=device)
    for number, given in ((0.5, None), (1.0, scale)):
        calls.setdefault("rmsnorm_quant", []).append((eight.clone(), x, w, number, given, EPS, None, None))
        calls.setdefault("fused_add_rmsnorm_quant", []).append(
            (eight.clone(), x, x.clone(), w, number, given, EPS, None, None)
        )
        calls.setdefault("layernorm_quant", []).append((eight.clone(), x, w, w, number, given, EPS, None))
    wide, scales = randn(6, 256, device=device).half(), torch.zeros(2, 8, device=device)
    calls["fused_add_rmsnorm_fp8_block_quant"] = [
        (wide.to(torch.float8_e4m3fn), scales, wide.clone(), wide, wide.clone(), wide[0].clone(), EPS, None, None)
    ]
    calls["rmsnorm_backward"] = [(x, x, w, None, EPS, None, 1.0), (x, x, w, x, 0.0, tensor, 0.0)]
    calls["layernorm_backward"] = [(x, x, w, EPS, None), (x, x, w.float(), 0.0, tensor)]
    return calls


def functions(device: str) -> dict[str, Case]:
    def rows(*names: str, weights: tuple[str, ...] = ("weight",)) -> Callable[[int], dict[str, Any]]:
        return lambda n: (
            {name: randn(n, 24, device=device) for name in names} | {name: randn(24, device=device) for name in weights}
        )

    cases = {}
    for gemma in ("", "gemma_"):
        norm, fused = getattr(flashinfer, f"{gemma}rmsnorm"), getattr(flashinfer, f"{gemma}fused_add_rmsnorm")
        cases[f"{gemma}rmsnorm"] = Case(norm, rows("input"), ("eps",), ("input", "weight"))
        cases[f"{gemma}rmsnorm out"] = Case(norm, rows("input", "out"), ("eps",), ("input", "weight"), ("out",))
        both = ("input", "residual")
        cases[f"{gemma}fused_add_rmsnorm"] = Case(fused, rows(*both), ("eps",), (*both, "weight"), both)
    affine = ("gemma", "beta")
    layernorm = flashinfer.layernorm
    cases["layernorm"] = Case(layernorm, rows("input", weights=affine), ("eps",), ("input", *affine))
    cases["layernorm out"] = Case(
        layernorm, rows("input", "out", weights=affine), ("eps",), ("input", *affine), ("out",)
    )

    def quantised(input: torch.Tensor, weight: torch.Tensor, scale: float = 0.5, eps: float = EPS) -> torch.Tensor:
        out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
        return flashinfer.rmsnorm_quant(out, input, weight, scale, eps).view(torch.uint8)

    def added(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
        out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
        flashinfer.fused_add_rmsnorm_quant(out, input, residual, weight, 0.5, eps)
        return out.view(torch.uint8)

    def centred(
        input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, scale: float = 0.5, eps: float = EPS
    ) -> Any:
        out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
        flashinfer.layernorm_quant(out, input, gemma, beta, scale, eps)
        return out.view(torch.uint8)

    def blocks(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
    ) -> list[torch.Tensor]:
        out, normed = torch.empty_like(input, dtype=torch.float8_e4m3fn), torch.empty_like(input)
        scale = torch.zeros(2, input.shape[0], device=device)
        flashinfer.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, input, residual, weight, eps)
        return [out.view(torch.uint8), scale, normed]

    def of_blocks(n: int) -> dict[str, Any]:
        return {name: randn(n, 256, device=device) for name in both} | {"weight": randn(256, device=device)}

    cases["layernorm_quant"] = Case(centred, rows("input", weights=affine), ("scale", "eps"))
    cases["fused_add_rmsnorm_fp8_block_quant"] = Case(blocks, of_blocks, ("eps",), written=("residual",))
    cases["rmsnorm_quant"] = Case(quantised, rows("input"), ("scale", "eps"))
    cases["fused_add_rmsnorm_quant"] = Case(added, rows(*both), ("eps",), (), ("residual",))
    cases["rmsnorm_backward"] = Case(
        flashinfer.rmsnorm_backward, rows("grad", "input"), differentiable=("grad", "input")
    )
    cases["layernorm_backward"] = Case(
        flashinfer.layernorm_backward, rows("grad", "input", weights=("gemma",)), differentiable=("grad", "input")
    )
    return cases


CASES = Cases(operators, functions)
