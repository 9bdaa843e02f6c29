"""Prefill on Hopper with partially visible first and last tiles of keys, at every border, against float64.

A warpgroup computes half of the last tile if its rows see no more.
"""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from tests.support.attention_oracle import (
    Paged,
    assert_near,
    batch_attention,
    drawn,
    indptr_of,
    multi_item_mask,
    token_positions,
    workspace,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wanted a GPU of compute capability 9.0",
)
BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# dtype, head_dim, query heads, key heads
SHAPES = [(BF16, 64, 2, 2), (F16, 64, 3, 1), (BF16, 128, 4, 1), (F16, 128, 1, 1), (BF16, 256, 2, 1), (E4M3, 64, 2, 2),
          (E4M3, 128, 5, 1)]  # fmt: skip
# The longest tile has 160 keys. Queries with few heads fill no tile of rows, others up to two.
LONGER = range(170)
OPTIONS = [dict(causal=True), dict(), dict(causal=True, window_left=0), dict(causal=True, window_left=131),
           dict(window_left=57), dict(causal=True, window_left=300)]  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 16, 5], ids=["ragged", "16", "5"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_borders_at_every_key_of_a_tile(shape, options, page_size):
    dtype, dim, heads, kv_heads = shape
    qo_lens = [1 + 41 * b % 230 for b in LONGER]
    kv_lens = [n + b for b, n in zip(LONGER, qo_lens, strict=True)]
    paged = Paged(kv_lens, page_size or 16, kv_heads, dim, dtype, "cuda")
    requests = [paged.request(b) for b in LONGER]
    q = drawn((sum(qo_lens), heads, dim), dtype, "cuda")
    want, want_lse = batch_attention(q, qo_lens, requests, **options)
    plan = {"q_data_type": dtype, **options}
    if page_size is None:
        # Rows after the last request belong to no request.
        k, v = (
            torch.cat([*(x[i] for x in requests), torch.full((200, kv_heads, dim), math.nan)]).to(dtype).cuda()
            for i in range(2)
        )
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cuda"), backend="fa3")
        wrapper.plan(indptr_of(qo_lens), indptr_of(kv_lens), heads, kv_heads, dim, **plan)
        inputs = [k[: sum(kv_lens)], v[: sum(kv_lens)]]
    else:
        forget_pages_before_windows(paged, qo_lens, options.get("window_left", -1))
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"), backend="fa3")
        wrapper.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), heads, kv_heads, dim, page_size, **plan)
        inputs = [paged.cache]
    out, lse = wrapper.run(q, *inputs, return_lse=True)
    again = wrapper.run(q, *inputs)
    check(dtype, out, lse, want, want_lse)
    assert torch.equal(out, again), "the same inputs, other bits"


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[6]], ids=str)
def test_items_between_which_keys_are_hidden(shape):
    dtype, dim, heads, kv_heads = shape
    prefixes = [7 * b % 190 for b in LONGER]
    items = [[b % 23, 64, 0, 3 + b % 71] for b in LONGER]
    kv_lens = [prefix + sum(lens) + len(lens) for prefix, lens in zip(prefixes, items, strict=True)]
    qo_lens = [1 + 31 * b % n for b, n in zip(LONGER, kv_lens, strict=True)]
    longest = max(n - prefix for n, prefix in zip(kv_lens, prefixes, strict=True))
    paged = Paged(kv_lens, 16, kv_heads, dim, dtype, "cuda")
    q = drawn((sum(qo_lens), heads, dim), dtype, "cuda")
    masks = [multi_item_mask(*one) for one in zip(qo_lens, kv_lens, prefixes, items, strict=True)]
    want, want_lse = batch_attention(q, qo_lens, [paged.request(b) for b in LONGER], masks)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"), backend="fa3")
    wrapper.plan(
        indptr_of(qo_lens), *paged.tables_on("cpu"), heads, kv_heads, dim, 16, q_data_type=dtype,
        prefix_len_ptr=torch.tensor(prefixes, dtype=torch.int32).to(torch.uint32).cuda(),
        token_pos_in_items_ptr=torch.cat([token_positions(lens, longest) for lens in items]).cuda(),
        token_pos_in_items_len=longest,
        max_item_len_ptr=torch.tensor([max(lens) for lens in items], dtype=torch.int32).to(torch.uint16).cuda(),
    )  # fmt: skip
    check(dtype, *wrapper.run(q, paged.cache, return_lse=True), want, want_lse)


def check(dtype, out, lse, want, want_lse) -> None:
    if dtype == E4M3:  # P has four significant bits
        assert_near(out.double(), want, lse, want_lse, tolerance=0.12, lse_tolerance=4e-3)
    else:
        assert_near(out, want, lse, want_lse)


def forget_pages_before_windows(paged: Paged, qo_lens: list[int], window_left: int) -> None:
    """Set pages before the first visible key to NaN."""
    if window_left < 0:
        return
    step = paged.page_size if paged.page_size % 16 else 16
    for qo_len, kv_len, table in zip(qo_lens, paged.kv_lens, paged.tables, strict=True):
        seen = max(0, kv_len - qo_len - window_left) // step * step
        paged.cache.view(torch.uint8)[table[: seen // paged.page_size]] = 255  # NaN of each dtype
