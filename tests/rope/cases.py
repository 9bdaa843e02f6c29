"""Calls of rotary embedding."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn

ANGLES = (None, False, 1.5, 1e4, True, 1.0, 4.0, 8192)


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    q, k = randn(5, 4, 16, device=device), randn(5, 2, 16, device=device)
    qg, kg = randn(5, 4, 16, device=device, grad=True), randn(5, 2, 16, device=device, grad=True)
    where = torch.arange(5, device=device)
    places = torch.tensor([0, 2, 5], device=device), torch.tensor([7, 0], device=device)
    cache = randn(9, 16, device=device)
    frequencies = torch.rand(8, dtype=torch.float64, device=device) + 0.1
    more = [(*ANGLES, None, False), (*ANGLES, frequencies, True)]
    return {
        "apply_rope": [(q, k, *places, *ANGLES)],
        "apply_rope_inplace": [(q.clone(), k.clone(), *places, *ANGLES)],
        "apply_rope_autograd": [(qg, kg, *places, *rest) for rest in more],
        "apply_rope_pos_ids": [(q, k, where, *ANGLES)],
        "apply_rope_pos_ids_inplace": [(q.clone(), k.clone(), where, *ANGLES)],
        "apply_rope_pos_ids_autograd": [(qg, kg, where, *rest) for rest in more],
        "apply_rope_with_cos_sin_cache": [(where, q, k, 16, cache, True)],
        "apply_rope_with_cos_sin_cache_inplace": [(where, q.clone(), k.clone(), 16, cache, True)],
        "apply_rope_with_cos_sin_cache_autograd": [
            (where, qg, kg, 16, cache, True, inverse) for inverse in (False, True)
        ],
    }


def functions(device: str) -> dict[str, Case]:
    plain = ("rope_scale", "rope_theta")
    llama31 = (*plain, "low_freq_factor", "high_freq_factor", "old_context_len")

    def heads(n: int) -> dict[str, Any]:
        return dict(q=randn(n, 3, 16, device=device), k=randn(n, 2, 16, device=device))

    def requests(n: int) -> dict[str, Any]:
        indptr, offsets = torch.tensor([0, 2, n], device=device), torch.tensor([100, 7], device=device)
        return heads(n) | dict(indptr=indptr, offsets=offsets)

    def given(n: int) -> dict[str, Any]:
        return heads(n) | dict(pos_ids=torch.randint(0, 300, (n,), device=device))

    def cached(n: int) -> dict[str, Any]:
        return dict(
            positions=torch.randint(0, 50, (n,), device=device),
            query=randn(n, 48, device=device),
            key=randn(n, 32, device=device),
            head_size=16,
            cos_sin_cache=randn(50, 8, device=device),
        )

    cases = {}
    for end in ("", "_inplace"):
        q_and_k, query_and_key = ("q", "k"), ("query", "key")
        for name, numbers in (("apply_rope", plain), ("apply_llama31_rope", llama31)):
            cases[name + end] = Case(
                getattr(flashinfer, name + end), requests, numbers, q_and_k, q_and_k if end else ()
            )
            by_ids = f"{name}_pos_ids{end}"
            cases[by_ids] = Case(getattr(flashinfer, by_ids), given, numbers, q_and_k, q_and_k if end else ())
        by_cache = f"apply_rope_with_cos_sin_cache{end}"
        cases[by_cache] = Case(getattr(flashinfer, by_cache), cached, (), query_and_key, query_and_key if end else ())
    return cases


CASES = Cases(operators, functions)
