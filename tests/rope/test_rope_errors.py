"""Rotary embedding of invalid positions, shapes, dtypes, strides and overlapping memory."""

from __future__ import annotations

import pytest
import torch

import flashinfer


@pytest.mark.parametrize("position", [-1, 8, 2**40])
def test_position_outside_the_cache(position, device):
    positions = torch.tensor([1, position, 7], device=device)
    q, k = torch.randn(3, 128, device=device), torch.randn(3, 64, device=device)
    whole = torch.full((24, 64), float("nan"), device=device)  # NaN around the cache would show in a result
    whole[8:16] = torch.randn(8, 64, device=device)
    arguments = (positions, q, k, 64, whole[8:16])
    if device == "cpu":
        before = q.clone()
        for function in (flashinfer.apply_rope_with_cos_sin_cache, flashinfer.apply_rope_with_cos_sin_cache_inplace):
            with pytest.raises(
                ValueError, match=f"positions: got {position} for token 1, wanted one below the cache's size of 8"
            ):
                function(*arguments)
        assert torch.equal(q, before), "something was written before the error"
        return
    got_q, got_k = flashinfer.apply_rope_with_cos_sin_cache(*arguments)
    assert torch.equal(got_q[1], q[1]) and torch.equal(got_k[1], k[1])
    assert bool(got_q.isfinite().all()) and not torch.equal(got_q[0], q[0])


def test_empty_cache(device):
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    q = torch.randn(0, 64, device=device)
    got, _ = flashinfer.apply_rope_with_cos_sin_cache(empty, q, q, 64, torch.zeros(0, 64, device=device))
    assert got.shape == (0, 64)
    if device == "cpu":
        with pytest.raises(ValueError, match="positions: got 0 for token 0"):
            flashinfer.apply_rope_with_cos_sin_cache(
                torch.zeros(1, dtype=torch.int32), torch.ones(1, 64), torch.ones(1, 64), 64, torch.zeros(0, 64)
            )


@pytest.mark.parametrize(
    "indptr, got", [([1, 4], "1 at 0"), ([0, 3, 2], "2 at 2"), ([0, 5], "5 at 1"), ([0, -1], "-1 at 1")]
)
def test_bad_indptr_on_the_cpu(indptr, got):
    q = torch.randn(4, 2, 64)
    before = q.clone()
    with pytest.raises(ValueError, match=f"indptr: got {got}, wanted 0 first"):
        flashinfer.apply_rope_inplace(
            q,
            torch.randn(4, 1, 64),
            torch.tensor(indptr, dtype=torch.int32),
            torch.zeros(len(indptr) - 1, dtype=torch.int32),
        )
    assert torch.equal(q, before)


BAD_ROPE = [
    (dict(q=torch.ones(4, 128)), ValueError, "q: got 2 dimensions, wanted 3"),
    (dict(k=torch.ones(4, 64)), ValueError, "k: got 2 dimensions, wanted 3"),
    (dict(k=torch.ones(5, 1, 64)), ValueError, r"k: got shape \[5, 1, 64\], wanted \[4, any, 64\]"),
    (dict(k=torch.ones(4, 1, 32)), ValueError, r"k: got shape \[4, 1, 32\], wanted \[4, any, 64\]"),
    (dict(k=torch.ones(4, 1, 64).half()), TypeError, "k: got float16, wanted float32"),
    (dict(q=torch.ones(4, 2, 64).int()), TypeError, "q: got int32, wanted float32"),
    (dict(q=torch.ones(4, 64, 2).transpose(1, 2)), ValueError, "q: got stride 2 of the last dimension"),
    (dict(indptr=torch.ones(3)), TypeError, "indptr: got float32, wanted int32 or int64"),
    (dict(indptr=torch.zeros(0, dtype=torch.int32)), ValueError, "indptr: got no element"),
    (dict(indptr=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "indptr: got 2 dimensions, wanted 1"),
    (dict(offsets=torch.zeros(3, dtype=torch.int32)), ValueError, r"offsets: got shape \[3\], wanted \[2\]"),
    (dict(rotary_dim=66), ValueError, "rotary_dim: got 66, wanted an even number of at most the head's size of 64"),
    (dict(rotary_dim=31), ValueError, "rotary_dim: got 31, wanted an even number"),
    (dict(rotary_dim=-2), ValueError, "rotary_dim: got -2, wanted an even number"),
    (dict(rope_scale=0.0), ValueError, "rope_scale: got 0.0+, wanted a positive number"),
    (dict(rope_theta=float("nan")), ValueError, "rope_theta: got -?nan, wanted a positive number"),
    (dict(q=None), TypeError, "q: got None, wanted Tensor"),
]


@pytest.mark.parametrize("change, error, message", BAD_ROPE)
def test_bad_input(change, error, message, device):
    arguments = dict(
        q=torch.ones(4, 2, 64),
        k=torch.ones(4, 1, 64),
        indptr=torch.tensor([0, 3, 4], dtype=torch.int32),
        offsets=torch.tensor([10, 20], dtype=torch.int32),
    )
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (arguments | change).items()}
    for function in (flashinfer.apply_rope, flashinfer.apply_rope_inplace):
        with pytest.raises(error, match=message):
            function(**arguments)
    for name in ("q", "k"):
        if name not in change:
            assert bool((arguments[name] == 1).all()), "something was written before the error"


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(pos_ids=torch.zeros(5, dtype=torch.int32)), ValueError, r"pos_ids: got shape \[5\], wanted \[4\]"),
        (dict(pos_ids=torch.zeros(4)), TypeError, "pos_ids: got float32, wanted int32 or int64"),
        (dict(low_freq_factor=0.0), ValueError, "low_freq_factor: got 0.0+, wanted a positive number"),
        (dict(high_freq_factor=0.5), ValueError, "high_freq_factor: got 0.50+, wanted at least low_freq_factor"),
        (dict(old_context_len=0), ValueError, "old_context_len: got 0, wanted a positive number"),
    ],
)
def test_bad_llama31(change, error, message, device):
    arguments = dict(q=torch.ones(4, 2, 64), k=torch.ones(4, 1, 64), pos_ids=torch.zeros(4, dtype=torch.int32)) | change
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    for function in (flashinfer.apply_llama31_rope_pos_ids, flashinfer.apply_llama31_rope_pos_ids_inplace):
        with pytest.raises(error, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(query=torch.ones(4)), ValueError, "query: got 1 dimensions, wanted 2 to 3"),
        (
            dict(query=torch.ones(4, 100)),
            ValueError,
            "query: got a last dimension of 100, wanted a multiple of head_size, 64",
        ),
        (dict(key=torch.ones(4, 1, 32)), ValueError, r"key: got shape \[4, 1, 32\], wanted \[4, any, 64\]"),
        (dict(key=torch.ones(3, 64)), ValueError, r"key: got shape \[3, 64\], wanted \[4, any\]"),
        (dict(head_size=0), ValueError, "head_size: got 0, wanted a positive size"),
        (dict(positions=torch.zeros(3, dtype=torch.int32)), ValueError, r"positions: got shape \[3\], wanted \[4\]"),
        (dict(positions=torch.zeros(4, dtype=torch.bool)), TypeError, "positions: got bool, wanted int32 or int64"),
        (dict(cos_sin_cache=torch.ones(8, 64).half()), TypeError, "cos_sin_cache: got float16, wanted float32"),
        (dict(cos_sin_cache=torch.ones(8)), ValueError, "cos_sin_cache: got 1 dimensions, wanted 2"),
        (dict(cos_sin_cache=torch.ones(8, 66)), ValueError, "cos_sin_cache: got 66, wanted an even number"),
        (dict(cos_sin_cache=torch.ones(64, 8).t()), ValueError, "cos_sin_cache: got stride 8 of the last dimension"),
    ],
)
def test_bad_cos_sin_cache(change, error, message, device):
    arguments = dict(
        positions=torch.zeros(4, dtype=torch.int32),
        query=torch.ones(4, 128),
        key=torch.ones(4, 64),
        head_size=64,
        cos_sin_cache=torch.ones(8, 64),
    )
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (arguments | change).items()}
    for function in (flashinfer.apply_rope_with_cos_sin_cache, flashinfer.apply_rope_with_cos_sin_cache_inplace):
        with pytest.raises(error, match=message):
            function(**arguments)


def test_indices_with_gaps(device):
    q, gaps = torch.ones(4, 2, 64, device=device), torch.zeros(8, dtype=torch.int32, device=device)[::2]
    with pytest.raises(ValueError, match="pos_ids: is not contiguous"):
        flashinfer.apply_rope_pos_ids(q, q, gaps)


def test_overlap_in_place(device):
    memory = torch.randn(4, 4, 64, device=device)
    pos_ids = torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="q: overlaps the memory of k"):
        flashinfer.apply_rope_pos_ids_inplace(memory[:, :3], memory[:, 2:], pos_ids)
    with pytest.raises(ValueError, match="q: has elements that share memory"):
        flashinfer.apply_rope_pos_ids_inplace(memory[:, :1].expand(4, 2, 64), memory[:, 2:], pos_ids)
    got, _ = flashinfer.apply_rope_pos_ids(
        memory[:, :1].expand(4, 2, 64), memory[:, :3], pos_ids
    )  # fine where only read
    assert torch.equal(got, memory[:, :1].expand(4, 2, 64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_tensors_on_two_devices():
    q = torch.ones(4, 2, 64, device="cuda")
    with pytest.raises(ValueError, match="one device|another device"):
        flashinfer.apply_rope_pos_ids(q, q, torch.zeros(4, dtype=torch.int32))
