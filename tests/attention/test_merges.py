"""Merges of more rows than the CTAs of a merge hold at a time."""

from __future__ import annotations

import torch

import flashinfer

from ..support.attention_oracle import assert_near, attention, drawn


def test_more_rows_than_ctas(device):
    """A GPU merges at least 4096 rows with 3 or more splits each. Some tiles are not full."""
    q = drawn((125, 32, 64), torch.float16, device)
    k, v = (drawn((4000, 8, 64), torch.float16, device) for _ in range(2))
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    want, want_lse = attention(q, k, v, causal=True)
    assert_near(out, want, lse, want_lse)
