"""Calls that put keys of MLA together, for tests that hold for every family."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.concat_ops import concat_mla_k

from ..support.cases import Case, Cases


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        shapes = (5, 3, 48), (5, 3, 32), (5, 1, 16)
        return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)

    return {"concat_mla_k": [inputs(torch.bfloat16), inputs(torch.float16)]}


def keys(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    k = k_nope.new_empty((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[2]))
    concat_mla_k(k, k_nope, k_rope)
    return k


def functions(device: str) -> dict[str, Case]:
    def parts(tokens: int) -> dict[str, Any]:
        nope, rope = torch.randn(tokens, 4, 32, device=device), torch.randn(tokens, 1, 16, device=device)
        return dict(k_nope=nope.bfloat16(), k_rope=rope.bfloat16())

    return {"concat_mla_k": Case(keys, parts)}


CASES = Cases(operators, functions)
