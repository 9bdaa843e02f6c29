"""Calls of the sampling family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer import sampling

from ..support.cases import Case, Cases

RANDOM = (None, 3, None, 4, None, -1)


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    probs = torch.rand(4, 40, device=device)
    numbers = torch.full((4,), 0.5, device=device)
    ks = torch.full((4,), 3, device=device)
    words = torch.arange(4, device=device)
    indices = torch.tensor([0, 0, 3, 2], device=device)
    draft, target = torch.rand(3, 2, 40, device=device), torch.rand(3, 3, 40, device=device)
    ids, counts = torch.ones(3, 2, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    plain = (None, 1.0, None, -1, None, 1.0, None, 0.0, False)
    return {
        "sample_from_rows": [
            (probs, False, *plain, None, *RANDOM),
            (
                probs,
                True,
                numbers,
                1.0,
                ks,
                -1,
                numbers,
                1.0,
                numbers,
                0.0,
                True,
                indices,
                words,
                0,
                words,
                0,
                words,
                0,
            ),
        ],
        "softmax": [(probs, None, 0.7, None), (probs.half(), numbers, 1.0, None)],
        "top_k_renorm_probs": [(probs, None, 3), (probs, ks, -1)],
        "top_p_renorm_probs": [(probs, None, 0.4), (probs, numbers, 1.0)],
        "top_k_mask_logits": [(probs, None, 3), (probs, ks, -1)],
        "top_k": [(probs, 5)],
        "chain_speculative_sampling": [(draft, ids, target, counts.clone(), counts.clone(), *RANDOM)],
    }


def functions(device: str) -> dict[str, Case]:

    def rows(name: str, **more: Any) -> Callable[[int], dict[str, Any]]:
        return lambda n: {name: torch.rand(n, 40, device=device), **more}

    random = dict(seed=5, offset=6)
    words = torch.tensor([5], device=device), torch.tensor([6], device=device)

    def chain(n: int) -> dict[str, Any]:
        return dict(
            draft_probs=torch.rand(n, 2, 40, device=device),
            draft_token_ids=torch.ones(n, 2, dtype=torch.int32, device=device),
            target_probs=torch.rand(n, 3, 40, device=device),
            **random,
        )

    def scores(n: int) -> dict[str, Any]:
        return dict(input=torch.randn(n, 40, device=device), lengths=torch.arange(n, device=device) % 41, k=5)

    def entries(n: int) -> dict[str, Any]:
        table = torch.arange(n * 40, dtype=torch.int32, device=device).view(n, 40)
        return dict(scores(n), src_page_table=table)

    s = sampling
    return {
        "top_k_page_table_transform": Case(s.top_k_page_table_transform, entries, ("k",)),
        "top_k_ragged_transform": Case(
            s.top_k_ragged_transform, lambda n: dict(scores(n), offsets=7 * torch.arange(n, device=device)), ("k",)
        ),
        "softmax": Case(s.softmax, rows("logits", temperature=0.7), ("temperature",)),
        "sampling_from_logits": Case(s.sampling_from_logits, rows("logits", **random), ("seed", "offset")),
        "sampling_from_probs": Case(s.sampling_from_probs, rows("probs", seed=words[0], offset=words[1]), ()),
        "top_p_sampling_from_probs": Case(s.top_p_sampling_from_probs, rows("probs", top_p=0.5, **random), ("top_p",)),
        "top_k_sampling_from_probs": Case(s.top_k_sampling_from_probs, rows("probs", top_k=5, **random), ("top_k",)),
        "min_p_sampling_from_probs": Case(s.min_p_sampling_from_probs, rows("probs", min_p=0.2, **random), ("min_p",)),
        "top_k_top_p_sampling_from_logits": Case(
            s.top_k_top_p_sampling_from_logits, rows("logits", top_k=9, top_p=0.6, **random), ("top_k", "top_p")
        ),
        "top_k_top_p_sampling_from_probs": Case(
            s.top_k_top_p_sampling_from_probs, rows("probs", top_k=9, top_p=0.6, **random), ("top_k", "top_p")
        ),
        "top_p_renorm_probs": Case(s.top_p_renorm_probs, rows("probs", top_p=0.5), ("top_p",)),
        "top_k_renorm_probs": Case(s.top_k_renorm_probs, rows("probs", top_k=5), ("top_k",)),
        "top_k_mask_logits": Case(s.top_k_mask_logits, rows("logits", top_k=5), ("top_k",)),
        "top_k": Case(s.top_k, rows("input", k=5), ("k",)),
        "chain_speculative_sampling": Case(s.chain_speculative_sampling, chain, ("seed", "offset")),
    }  # fmt: skip


CASES = Cases(operators, functions)
