"""Indices of any integer dtype and any strides: equal results and equal checks of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer

from .test_page import Requests, int32

PAGE, HEADS, DIM = 4, 2, 8
OTHERS = [torch.int64, torch.uint8, torch.uint16, "strided", "strided int64"]


def as_other(x: torch.Tensor, other: object) -> torch.Tensor:
    """Return the same numbers with another dtype or other strides."""
    if isinstance(other, torch.dtype):
        return x.to(other)
    return (x if other == "strided" else x.long()).repeat_interleave(3)[::3]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_integers(other, device):
    requests = Requests(5, PAGE, device)
    key, value = (torch.randn(requests.nnz, HEADS, DIM, device=device) for _ in range(2))
    ckv, kpe = key.flatten(1), value[:, 0]

    def results(convert: Any) -> list[torch.Tensor]:
        tokens, pages = ([convert(x) for x in tables] for tables in (requests.tokens, requests.pages))
        cache = torch.full((requests.num_pages, 2, PAGE, HEADS, DIM), 7.0, device=device)
        flashinfer.append_paged_kv_cache(key, value, *tokens, cache, *pages)
        caches = [torch.full((requests.num_pages, PAGE, x.shape[1]), 7.0, device=device) for x in (ckv, kpe)]
        flashinfer.append_paged_mla_kv_cache(ckv, kpe, *tokens, *caches, *pages)
        lens = flashinfer.get_seq_lens(pages[1], pages[2], PAGE)
        where = flashinfer.get_batch_indices_positions(convert(requests.append_indptr), convert(lens), requests.nnz)
        offsets = torch.full((sum(requests.seq_lens),), -7, dtype=torch.int32, device=device)
        starts = int32([0, *torch.tensor(requests.seq_lens).cumsum(0).tolist()], device)
        flashinfer.page.block_sparse_indices_to_vector_sparse_offsets(
            pages[0], pages[1], offsets, convert(starts), convert(lens), 100, 1, PAGE
        )
        return [cache, *caches, lens, *where, offsets]

    for got, want in zip(results(lambda x: as_other(x, other)), results(lambda x: x), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_values_beyond_int32(device):
    """On the CPU an error before any write. On CUDA a skipped token, not one at the slot modulo 2^32."""
    requests = Requests(3, PAGE, device)
    key = torch.randn(requests.nnz, HEADS, DIM, device=device)
    cache = torch.full((requests.num_pages, 2, PAGE, HEADS, DIM), 7.0, device=device)
    far = requests.kv_indices.long() + (1 << 32)
    arguments = key, key, *requests.tokens, cache, far, *requests.pages[1:]
    if device == "cpu":
        with pytest.raises(ValueError, match=r"kv_indices: got 42949\d+, wanted -2147483648 to 2147483647"):
            flashinfer.append_paged_kv_cache(*arguments)
    else:
        flashinfer.append_paged_kv_cache(*arguments)
    assert bool((cache == 7).all())


def test_graphs_narrow_them_too(device):
    requests = Requests(3, PAGE, device)
    key = torch.randn(requests.nnz, HEADS, DIM, device=device)
    caches = [torch.full((requests.num_pages, 2, PAGE, HEADS, DIM), 7.0, device=device) for _ in range(2)]
    flashinfer.append_paged_kv_cache(key, key, *requests.tokens, caches[0], *requests.pages)
    tables = [as_other(x, "strided int64") for x in (*requests.tokens, *requests.pages)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def append(cache: torch.Tensor, *tables: torch.Tensor) -> None:
        flashinfer.append_paged_kv_cache(key, key, *tables[:2], cache, *tables[2:])

    append(caches[1], *tables)
    assert torch.equal(*caches)
