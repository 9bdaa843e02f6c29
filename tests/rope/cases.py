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
    half = q.half(), k.half(), q.half(), k.half()
    outs = [torch.empty(5, heads, 16, dtype=torch.float8_e4m3fn, device=device) for heads in (4, 2, 4, 2)]
    caches = [torch.zeros(3, 4, 2, dim, device=device).to(torch.float8_e4m3fn) for dim in (32, 8)]
    tables = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, 1, 2], [0, 3], [0] * 5, range(5))]
    scales = (0.5, None, 1.0, torch.full((1,), 2.0, device=device))
    return {
        "rope_quantize_fp8": [(*half, cache, where, True, *scales, *outs, None)],
        "rope_quantize_fp8_append_paged_kv_cache": [
            (*half, half[1][..., :8], cache, where, *caches, *tables, False, *scales, 4, False, outs[0], outs[2], None)
        ],
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

    def inputs(n: int) -> dict[str, Any]:
        return heads(n) | dict(pos_ids=torch.randint(0, 300, (n,), device=device))

    def cached(n: int) -> dict[str, Any]:
        return dict(
            positions=torch.randint(0, 50, (n,), device=device),
            query=randn(n, 48, device=device),
            key=randn(n, 32, device=device),
            head_size=16,
            cos_sin_cache=randn(50, 8, device=device),
        )

    def quantised(n: int) -> dict[str, Any]:
        return dict(
            q_rope=randn(n, 3, 8, device=device),
            k_rope=randn(n, 2, 8, device=device),
            q_nope=randn(n, 3, 24, device=device),
            k_nope=randn(n, 2, 24, device=device),
            cos_sin_cache=randn(50, 8, device=device),
            pos_ids=torch.randint(0, 50, (n,), device=device),
        )

    def latent(n: int) -> dict[str, Any]:
        return quantised(n) | dict(k_rope=randn(n, 8, device=device), k_nope=randn(n, 16, device=device))

    def paged(n: int) -> dict[str, Any]:
        count, pages = torch.arange(n, dtype=torch.int32, device=device), (n + 3) // 4
        return quantised(n) | dict(
            v=randn(n, 2, 16, device=device),
            k_cache=torch.zeros(64, 4, 2, 32, dtype=torch.uint8, device=device),
            v_cache=torch.zeros(64, 4, 2, 16, dtype=torch.uint8, device=device),
            kv_indices=torch.arange(pages + 20, dtype=torch.int32, device=device),
            kv_indptr=torch.tensor([0, pages], dtype=torch.int32, device=device),
            batch_indices=torch.zeros_like(count),
            positions=count,
        )

    def as_bytes(parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [part.view(torch.uint8) for part in parts]

    def quantize(quant_scale_q: float = 0.5, quant_scale_kv: float = 2.0, **arguments: Any) -> list[torch.Tensor]:
        return as_bytes(
            flashinfer.rope_quantize_fp8(**arguments, quant_scale_q=quant_scale_q, quant_scale_kv=quant_scale_kv)
        )

    def quantize_latent(
        quant_scale_q: float = 0.5, quant_scale_kv: float = 2.0, **arguments: Any
    ) -> list[torch.Tensor]:
        return as_bytes(
            flashinfer.mla_rope_quantize_fp8(**arguments, quant_scale_q=quant_scale_q, quant_scale_kv=quant_scale_kv)
        )

    def append(
        k_cache: torch.Tensor, v_cache: torch.Tensor, quant_scale_q: float = 0.5, quant_scale_kv: float = 2.0,
        **arguments: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Append to caches of bytes, because torch compares no numbers of eight bits."""
        caches = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
        return as_bytes(
            flashinfer.rope_quantize_fp8_append_paged_kv_cache(
                **arguments, paged_kv_cache=caches, page_size=4, quant_scale_q=quant_scale_q,
                quant_scale_kv=quant_scale_kv,
            )
        )  # fmt: skip

    scales = ("quant_scale_q", "quant_scale_kv")
    cases = {
        "rope_quantize_fp8": Case(quantize, quantised, scales),
        "mla_rope_quantize_fp8": Case(quantize_latent, latent, scales),
        "rope_quantize_fp8_append_paged_kv_cache": Case(append, paged, scales, written=("k_cache", "v_cache")),
    }
    for end in ("", "_inplace"):
        q_and_k, query_and_key = ("q", "k"), ("query", "key")
        for name, numbers in (("apply_rope", plain), ("apply_llama31_rope", llama31)):
            cases[name + end] = Case(
                getattr(flashinfer, name + end), requests, numbers, q_and_k, q_and_k if end else ()
            )
            by_ids = f"{name}_pos_ids{end}"
            cases[by_ids] = Case(getattr(flashinfer, by_ids), inputs, numbers, q_and_k, q_and_k if end else ())
        by_cache = f"apply_rope_with_cos_sin_cache{end}"
        cases[by_cache] = Case(getattr(flashinfer, by_cache), cached, (), query_and_key, query_and_key if end else ())
    return cases


CASES = Cases(operators, functions)
