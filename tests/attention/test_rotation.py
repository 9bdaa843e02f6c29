"""RoPE on the fly: angles at any position, every tile shape, and blocks of rotated keys."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer

from ..conftest import DEVICES
from ..support.attention_oracle import FLOAT8, assert_near, attention, drawn, indptr_of, int32, workspace

F8 = FLOAT8[0]
# Element types of queries and of keys, and head dimensions. On a GPU each has its own tiles.
PLACES = [
    (device, *rest)
    for device, places in {
        "cpu": [(torch.float32, torch.float32, (64, 64))],
        "cuda": [
            (torch.float16, torch.float16, (64, 64)),
            (torch.bfloat16, torch.bfloat16, (128, 128)),
            (torch.bfloat16, F8, (128, 128)),
            (torch.bfloat16, F8, (192, 128)),
            (torch.float16, torch.float16, (192, 128)),
            (torch.float16, torch.float16, (256, 256)),
        ],
    }.items()
    if device in DEVICES
    for rest in places
]
places = pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: f"{place[0]}-{place[2]}-{place[3]}".replace("torch.", "")
)
ROPE = dict(pos_encoding_mode="ROPE_LLAMA")


@places
@pytest.mark.parametrize("qo_len, kv_len", [(1, 1), (5, 3), (40, 130), (70, 200), (300, 300), (4, 3000)])
def test_prefill(place, qo_len, kv_len):
    """Full tiles of rows, and keys that end inside a tile. (5, 3) has positions before the first."""
    device, dtype, kv_dtype, dim = place
    q = drawn((qo_len, 4, dim[0]), dtype, device)
    k, v = (drawn((kv_len, 2, d), kv_dtype, device) for d in dim)
    options = dict(causal=random.random() < 0.5, rope_scale=random.choice([None, 4.0]), rope_theta=5e5, **ROPE)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, o_dtype=dtype, **options)
    want, want_lse = attention(q, k.float(), v.float(), **options)
    assert_near(out, want, lse, want_lse)


@places
def test_decode(place):
    device, dtype, kv_dtype, dim = place
    q, (k, v) = drawn((8, dim[0]), dtype, device), (drawn((777, 2, d), kv_dtype, device) for d in dim)
    out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, return_lse=True, **ROPE)
    want, want_lse = attention(q[None], k.float(), v.float(), **ROPE)
    assert_near(out[None], want, lse[None], want_lse)


@places
@pytest.mark.parametrize("first", [2**24, 2**30])
def test_far_from_the_start(place, first):
    """Logits depend only on distances, at any position. float32 has no odd numbers above 2^24."""
    device, dtype, kv_dtype, dim = place
    window, new, beyond, page_size = 100, 33, 97, 2**16
    pages = first // page_size + 1
    cache = [drawn((2, page_size, 1, d), kv_dtype) for d in dim]
    q = drawn((new, 2, dim[0]), dtype, device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        indptr_of([new]), int32([0, pages]), int32([0] * (pages - 1) + [1]), int32([beyond]), 2, 1, dim[0],
        page_size, head_dim_vo=dim[1], causal=True, window_left=window, q_data_type=dtype, kv_data_type=kv_dtype, **ROPE,
    )  # fmt: skip
    out, lse = wrapper.run(q, tuple(x.to(device) for x in cache), return_lse=True)
    k, v = (torch.cat([x[0, -window:], x[1, :beyond]]).float() for x in cache)
    want, want_lse = attention(q, k.to(device), v.to(device), causal=True, window_left=window, **ROPE)
    assert_near(out, want, lse, want_lse)
