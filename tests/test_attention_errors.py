"""What decode and prefill refuse: which argument, what it was, what is wanted; nothing is written before."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from tests.attention_oracle import int32, workspace

# Mistakes

BAD_SINGLE = [
    (dict(q=torch.ones(1, 4, 64).half()), ValueError, "q: got 3 dimensions, wanted 2"),
    (dict(k=torch.ones(4, 64).half()), ValueError, "k: got 2 dimensions, wanted 3"),
    (dict(v=None), TypeError, "v: got NoneType, wanted Tensor"),
    (dict(k=torch.ones(5, 3, 64).half()), ValueError, "q: got 4 heads, wanted a multiple of the 3 heads of k"),
    (dict(v=torch.ones(6, 2, 64).half()), ValueError, r"v: got shape \[6, 2, 64\], wanted \[5, 2, any\]"),
    (dict(k=torch.ones(5, 2, 32).half()), ValueError, "k: got head_dim 32, wanted 64 as q has"),
    (dict(v=torch.ones(5, 2, 64)), TypeError, "v: got float32, wanted float16 as k has"),
    (dict(q=torch.ones(4, 64).double()), ValueError, "dtype_q: got float64, wanted one of float32, float16, bfloat16, float8_e4m3fn"),
    (dict(k=torch.ones(5, 2, 64).long()), ValueError, "dtype_kv: got int64, wanted one of float32, float16"),
    (dict(kv_layout="nhd"), ValueError, "kv_layout: got 'nhd', wanted 'NHD' or 'HND'"),
    (dict(pos_encoding_mode="ROPE"), ValueError, "pos_encoding_mode: got 'ROPE', wanted one of NONE, ROPE_LLAMA, ALIBI"),
    (dict(rope_scale=0.0), ValueError, "rope_scale: got 0.0, wanted a positive number"),
    (dict(rope_theta=-1), ValueError, "rope_theta: got -1.0, wanted a positive number"),
    (dict(sm_scale=math.nan), ValueError, "sm_scale: got nan, wanted a finite number"),
    (dict(logits_soft_cap=math.inf), ValueError, "logits_soft_cap: got inf, wanted a finite number"),
    (dict(k_scale=torch.ones(3)), ValueError, r"k_scale: got shape \[3\], wanted one number or \[2\]"),
    (dict(v_scale=torch.ones(4, 1)), ValueError, r"v_scale: got shape \[4, 1\], wanted one number or \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD_SINGLE)
def test_bad_single(change, error, message, device):
    arguments = dict(q=torch.ones(4, 64).half(), k=torch.ones(5, 2, 64).half(), v=torch.ones(5, 2, 64).half()) | change
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with pytest.raises(error, match=message):
        flashinfer.single_decode_with_kv_cache(**arguments)


def test_head_dims_that_no_kernel_has(device):
    size = 516 if device == "cpu" else 72
    wanted = "a multiple of 8 up to 512 on cpu" if device == "cpu" else "one of 64, 128, 256, 192:128 .* on cuda"
    x = torch.ones(1, size, device=device).half()
    with pytest.raises(ValueError, match=f"head_dim: got {size}, wanted {wanted}"):
        flashinfer.single_decode_with_kv_cache(x, x[None], x[None])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float32 is missing on CUDA only")
def test_float32_on_cuda():
    x = torch.ones(1, 64, device="cuda")
    with pytest.raises(ValueError, match="dtype_q: got float32, wanted one of float16, bfloat16 on cuda"):
        flashinfer.single_decode_with_kv_cache(x, x[None], x[None])


def test_tensors_on_two_devices(device):
    q, k = torch.ones(4, 64, device=device).half(), torch.ones(5, 2, 64, device="meta").half()
    with pytest.raises(ValueError, match=f"got tensors on {device}.*, wanted one device for all"):
        flashinfer.single_decode_with_kv_cache(q, k, k)


BAD_PLAN = [
    (dict(indptr=[1, 2, 4]), ValueError, "indptr: got 1 first, wanted 0"),
    (dict(indptr=[]), ValueError, "indptr: got no element first, wanted 0"),
    (dict(indptr=[0, 3, 2]), ValueError, "indptr: got 2 at 2 after 3, wanted numbers that never fall"),
    (dict(indptr=[0, 2]), ValueError, "last_page_len: got 2 elements, wanted 1"),
    (dict(indptr=[0, 2, 5]), ValueError, "indices: got 4 pages, and indptr names 5"),
    (dict(indices=[0, -1, 2, 3]), ValueError, "indices: got -1, wanted numbers of pages"),
    (dict(last_page_len=[3, 0]), ValueError, "last_page_len: got 0 for request 1, wanted 1 to the page_size of 16"),
    (dict(last_page_len=[17, 2]), ValueError, "last_page_len: got 17 for request 0, wanted 1 to the page_size of 16"),
    (dict(indptr=torch.zeros(3, dtype=torch.int64)), TypeError, r"indptr: got torch.int64, wanted torch.int32"),
    (dict(indices=None), TypeError, "indices: got NoneType, wanted Tensor"),
    (dict(last_page_len=torch.zeros(2, 1, dtype=torch.int32)), ValueError, r"last_page_len: got shape \[2, 1\], wanted a contiguous vector"),
    (dict(indices=torch.zeros(8, dtype=torch.int32)[::2]), ValueError, r"indices: got shape \[4\], wanted a contiguous vector"),
    (dict(page_size=0), ValueError, "page_size: got 0, wanted a positive number"),
    (dict(page_size=1 << 30), ValueError, "more than 2147483647 keys"),
    (dict(num_qo_heads=7), ValueError, "num_qo_heads: got 7, wanted a multiple of num_kv_heads, 2"),
    (dict(num_kv_heads=0), ValueError, "num_kv_heads: got 0, wanted a positive number"),
    (dict(head_dim=-8), ValueError, "head_dim_qk: got -8, wanted a positive number"),
    (dict(q_data_type="float61"), ValueError, "dtype: got 'float61', wanted the name of a torch dtype"),
    (dict(q_data_type=16), TypeError, "dtype: got int, wanted a torch.dtype or its name"),
    (dict(q_data_type="int8"), ValueError, "dtype_q: got int8, wanted one of"),
    (dict(pos_encoding_mode="none"), ValueError, "pos_encoding_mode: got 'none'"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD_PLAN)
def test_bad_plan(change, error, message, device):
    arguments = dict(indptr=[0, 2, 4], indices=[0, 1, 2, 3], last_page_len=[3, 16], num_qo_heads=4, num_kv_heads=2,
                     head_dim=64, page_size=16) | change  # fmt: skip
    arguments = {n: int32(x) if isinstance(x, list) else x for n, x in arguments.items()}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(error, match=message):
        wrapper.plan(**arguments)
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.run(torch.ones(2, 4, 64, device=device).half(), torch.ones(4, 2, 16, 2, 64, device=device).half())


BAD_RUN = [
    (dict(q=torch.ones(3, 4, 64).half()), ValueError, r"q: got 3 queries, and plan\(\) was called for 2"),
    (dict(q=torch.ones(2, 8, 64).half()), ValueError, r"q: got shape \[2, 8, 64\], and plan\(\) was called for \[2, 4, 64\]"),
    (dict(q=torch.ones(2, 64).half()), ValueError, "q: got 2 dimensions, wanted 3"),
    (dict(q=torch.ones(2, 4, 64).bfloat16()), TypeError, "q, k: got torch.bfloat16 and torch.float16, and plan"),
    (dict(paged_kv_cache=torch.ones(4, 2, 16, 2, 64)), TypeError, "q, k: got torch.float16 and torch.float32, and plan"),
    (dict(paged_kv_cache=torch.ones(4, 2, 8, 2, 64).half()), ValueError, "paged_kv_cache: got pages of 8, and plan"),
    (dict(paged_kv_cache=torch.ones(4, 2, 16, 4, 64).half()), ValueError, "k, v: got 4 heads and head_dim 64 .* for 2, 64 and 64"),
    (dict(paged_kv_cache=torch.ones(3, 2, 16, 2, 64).half()), ValueError, r"k: got 3 pages, and the tables of plan\(\) name 4"),
    (dict(paged_kv_cache=torch.ones(4, 3, 16, 2, 64).half()), ValueError, "paged_kv_cache: got size 3 of dimension 1, wanted 2"),
    (dict(paged_kv_cache=torch.ones(4, 16, 2, 64).half()), ValueError, "paged_kv_cache: got 4 dimensions, wanted 5"),
    (dict(paged_kv_cache=None), TypeError, "paged_kv_cache: got NoneType, wanted Tensor or a pair"),
    (dict(paged_kv_cache=(torch.ones(4, 16, 2, 64).half(),)), ValueError, "paged_kv_cache: got 1 tensors, wanted 1 or 2"),
    (dict(paged_kv_cache=torch.ones(4, 2, 16, 2, 128).half()[..., ::2]), ValueError, "k: got stride 2 of the last dimension, wanted 1"),
    (dict(out=torch.ones(2, 4, 32).half()), ValueError, r"out: got shape \[2, 4, 32\], wanted \[2, 4, 64\]"),
    (dict(out=torch.ones(2, 4, 64)), TypeError, "out: got torch.float32, wanted torch.float16"),
    (dict(lse=torch.ones(2, 2)), ValueError, r"lse: got shape \[2, 2\], wanted \[2, 4\]"),
    (dict(lse=torch.ones(2, 4).half()), TypeError, "lse: got torch.float16, wanted torch.float32"),
    (dict(lse=torch.ones(2, 8)[:, ::2]), ValueError, "lse: is not contiguous"),
    (dict(k_scale=torch.ones(3)), ValueError, r"k_scale: got shape \[3\]"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD_RUN)
def test_bad_run(change, error, message, device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 2, 4]), int32([0, 1, 2, 3]), int32([3, 16]), 4, 2, 64, 16)
    arguments = dict(q=torch.ones(2, 4, 64).half(), paged_kv_cache=torch.ones(4, 2, 16, 2, 64).half()) | change
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
    arguments = {n: tuple(map(move, x)) if isinstance(x, tuple) else move(x) for n, x in arguments.items()}
    with pytest.raises(error, match=message):
        wrapper.run(**arguments)


def test_more_arguments_than_a_variant_has(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 1]), int32([0]), int32([3]), 4, 2, 64, 16)
    with pytest.raises(TypeError, match="got 1 more arguments, wanted none without jit_args"):
        wrapper.run(torch.ones(1, 4, 64, device=device).half(), torch.ones(1, 2, 16, 2, 64, device=device).half(), 0.5)
