"""Calls of the functions that fill paged caches."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn


def _paged(device: str) -> dict[str, torch.Tensor]:
    """Return two requests with 3 and 2 new tokens in pages of 4."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return dict(
        append_indptr=ints(0, 3, 5),
        seq_lens=ints(7, 2),
        batch_indices=ints(0, 0, 0, 1, 1),
        positions=ints(4, 5, 6, 0, 1),
        kv_indices=ints(3, 1, 0),
        kv_indptr=ints(0, 2, 3),
        kv_last_page_len=ints(3, 2),
        offsets=torch.zeros(9, dtype=torch.int32, device=device),
        offsets_indptr=ints(0, 7, 9),
    )


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    p = _paged(device)
    tokens = p["batch_indices"], p["positions"]
    pages = p["kv_indices"], p["kv_indptr"], p["kv_last_page_len"]
    new, cache = randn(5, 2, 8, device=device), torch.zeros(4, 2, 4, 2, 8, device=device)
    ckv, kpe = randn(5, 16, device=device), randn(5, 8, device=device)
    return {
        "append_paged_kv_cache": [
            (new, new, *tokens, cache, None, *pages, False),
            (new, new, *tokens, cache[:, 0].clone(), cache[:, 1].clone(), *pages, False),
        ],
        "append_paged_mla_kv_cache": [
            (ckv, kpe, *tokens, torch.zeros(4, 4, 16, device=device), torch.zeros(4, 4, 8, device=device), *pages)
        ],
        "get_batch_indices_positions": [(p["append_indptr"], p["seq_lens"], 5)],
        "get_batch_indices_positions_out": [
            (p["append_indptr"], p["seq_lens"], *(p["positions"].clone() for _ in "12"))
        ],
        "get_seq_lens": [(p["kv_indptr"], p["kv_last_page_len"], 4)],
        "block_sparse_indices_to_vector_sparse_offsets": [
            (p["kv_indices"], p["kv_indptr"], p["offsets"], p["offsets_indptr"], p["seq_lens"], 8, 2, 4)
        ],
    }


def functions(device: str) -> dict[str, Case]:
    def tokens(n: int) -> dict[str, Any]:
        """Return n tokens of one request in pages of 4."""
        count = torch.arange(n, dtype=torch.int32, device=device)
        pages = (n + 3) // 4
        return dict(
            batch_indices=torch.zeros_like(count),
            positions=count,
            kv_indices=torch.arange(pages + 20, dtype=torch.int32, device=device),
            kv_indptr=torch.tensor([0, pages], dtype=torch.int32, device=device),
            kv_last_page_len=torch.tensor([n - 4 * (pages - 1)], dtype=torch.int32, device=device),
        )

    def append(n: int) -> dict[str, Any]:
        new = dict(append_key=randn(n, 2, 8, device=device), append_value=randn(n, 2, 8, device=device))
        return tokens(n) | new | dict(paged_kv_cache=torch.zeros(64, 2, 4, 2, 8, device=device))

    def append_mla(n: int) -> dict[str, Any]:
        new = dict(append_ckv=randn(n, 16, device=device), append_kpe=randn(n, 8, device=device))
        caches = dict(ckv_cache=torch.zeros(64, 4, 16, device=device), kpe_cache=torch.zeros(64, 4, 8, device=device))
        return tokens(n) | new | caches

    def lengths(n: int) -> dict[str, Any]:
        ones = torch.ones(n, dtype=torch.int32, device=device)
        return dict(append_indptr=torch.arange(n + 1, dtype=torch.int32, device=device), seq_lens=ones + 3, nnz=n)

    def buffers(n: int) -> dict[str, Any]:
        return lengths(n) | {
            name: torch.zeros(n, dtype=torch.int32, device=device) for name in ("batch_indices", "positions")
        }

    def last_pages(n: int) -> dict[str, Any]:
        indptr = torch.arange(n + 1, dtype=torch.int32, device=device) * 2
        return dict(kv_indptr=indptr, kv_last_page_len=torch.ones(n, dtype=torch.int32, device=device), page_size=4)

    def blocks(n: int) -> dict[str, Any]:
        indptr = torch.arange(n + 1, dtype=torch.int32, device=device)
        return dict(
            block_sparse_indices=indptr[:-1].clone(),
            block_sparse_indptr=indptr,
            vector_sparse_offsets=torch.zeros(3 * n, dtype=torch.int32, device=device),
            vector_sparse_indptr=indptr * 3,
            kv_lens=torch.full((n,), 3, dtype=torch.int32, device=device),
            stride_block=8,
            stride_n=2,
            block_size=4,
        )

    return {
        "append_paged_kv_cache": Case(flashinfer.append_paged_kv_cache, append, written=("paged_kv_cache",)),
        "append_paged_mla_kv_cache": Case(
            flashinfer.append_paged_mla_kv_cache, append_mla, written=("ckv_cache", "kpe_cache")
        ),
        "get_batch_indices_positions": Case(flashinfer.get_batch_indices_positions, lengths),
        "get_batch_indices_positions out": Case(
            flashinfer.get_batch_indices_positions, buffers, written=("batch_indices", "positions")
        ),
        "get_seq_lens": Case(flashinfer.get_seq_lens, last_pages, ("page_size",)),
        "block_sparse_indices_to_vector_sparse_offsets": Case(
            flashinfer.block_sparse_indices_to_vector_sparse_offsets,
            blocks,
            ("stride_block", "stride_n", "block_size"),
            written=("vector_sparse_offsets",),
        ),
    }


CASES = Cases(operators, functions)
