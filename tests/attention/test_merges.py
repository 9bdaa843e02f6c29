"""Keys that are split over more rows than blocks put together at one time."""

from __future__ import annotations

import torch

import flashinfer

from ..support.attention_oracle import assert_near, attention, drawn


def test_rows_are_taken_in_turns(device):
    """On a GPU 4096 rows and more, of 3 or more parts each; some tiles are not full."""
    q = drawn((125, 32, 64), torch.float16, device)
    k, v = (drawn((4000, 8, 64), torch.float16, device) for _ in range(2))
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    want, want_lse = attention(q, k, v, causal=True)
    assert_near(out, want, lse, want_lse)
