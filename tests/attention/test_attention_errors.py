"""Errors of decode and prefill: argument, got, wanted, and nothing written."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
import flashinfer.utils
from tests.support.attention_oracle import int32, workspace

# Decode

BAD_SINGLE = [
    (dict(q=torch.ones(1, 4, 64).half()), ValueError, "q: got 3 dimensions, wanted 2"),
    (dict(k=torch.ones(4, 64).half()), ValueError, "k: got 2 dimensions, wanted 3"),
    (dict(v=None), TypeError, "v: got NoneType, wanted Tensor"),
    (dict(k=torch.ones(5, 3, 64).half()), ValueError, "q: got 4 heads, wanted a multiple of the 3 heads of k"),
    (dict(v=torch.ones(6, 2, 64).half()), ValueError, r"v: got shape \[6, 2, 64\], wanted \[5, 2, any\]"),
    (dict(k=torch.ones(5, 2, 32).half()), ValueError, "k: got head_dim 32, wanted 64 as q has"),
    (dict(v=torch.ones(5, 2, 64)), TypeError, "v: got float32, wanted float16 as k has"),
    (dict(q=torch.ones(4, 64).double()), ValueError, "cache: q: got float64, wanted one of float32, float16, bfloat16, float8_e4m3fn"),
    (dict(k=torch.ones(5, 2, 64).long()), ValueError, "cache: k: got int64, wanted one of float32, float16"),
    (dict(kv_layout="nhd"), ValueError, "kv_layout: got 'nhd', wanted 'NHD' or 'HND'"),
    (dict(pos_encoding_mode="ROPE"), ValueError, "pos_encoding_mode: got 'ROPE', wanted 'NONE', 'ROPE_LLAMA' or 'ALIBI'"),
    (dict(rope_scale=0.0), ValueError, "rope_scale: got 0.0, wanted a positive number"),
    (dict(rope_theta=-1), ValueError, "rope_theta: got -1.0, wanted a positive number"),
    (dict(sm_scale=math.nan), ValueError, "sm_scale: got nan, wanted a finite number"),
    (dict(logits_soft_cap=math.inf), ValueError, "logits_soft_cap: got inf, wanted a finite number"),
    (dict(sm_scale="a"), TypeError, r"cache: sm_scale: got str, wanted (a number|Optional\[float\])"),
    (dict(sm_scale=torch.ones(2)), TypeError, r"sm_scale: got Tensor, wanted (a number|Optional\[float\])"),
    (dict(logits_soft_cap="1"), TypeError, "logits_soft_cap: got str, wanted a number"),
    (dict(rope_theta=[1]), TypeError, "rope_theta: got list, wanted a number"),
    (dict(window_left=2.7), TypeError, "cache: window_left: got 2.7, wanted an integer"),
    (dict(window_left=None), TypeError, "window_left: got NoneType, wanted an integer"),
    (dict(k_scale="a"), TypeError, "cache: k_scale: got str, wanted a number"),
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
    wanted = "a multiple of 8 up to 512 on cpu" if device == "cpu" else "one of 64, 128, 256, 192:128, 80, .* on cuda"
    x = torch.ones(1, size, device=device).half()
    with pytest.raises(ValueError, match=f"single_decode_with_kv_cache: head_dim: got {size}, wanted {wanted}"):
        flashinfer.single_decode_with_kv_cache(x, x[None], x[None])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float32 is missing on CUDA only")
def test_float32_on_cuda():
    x = torch.ones(1, 64, device="cuda")
    with pytest.raises(ValueError, match="cache: q: got float32, wanted one of float16, bfloat16 on cuda"):
        flashinfer.single_decode_with_kv_cache(x, x[None], x[None])


def test_tensors_on_two_devices(device):
    q, k = torch.ones(4, 64, device=device).half(), torch.ones(5, 2, 64, device="meta").half()
    with pytest.raises(ValueError, match=f"cache: k: got a tensor on meta, wanted one on {device}.* as q is"):
        flashinfer.single_decode_with_kv_cache(q, k, k)


META = torch.zeros(4, dtype=torch.int32, device="meta")
BAD_PLAN = [
    (dict(indptr=[-1, 2, 4]), ValueError, "indptr: got -1 first, wanted 0 or more"),
    (dict(indptr=[]), ValueError, "indptr: got no element first, wanted 0 or more"),
    (dict(indptr=[0, 3, 2]), ValueError, "indptr: got 2 at 2 after 3, wanted numbers that never decrease"),
    (dict(indptr=[0, 2]), ValueError, "last_page_len: got 2 elements, wanted 1"),
    (dict(indptr=[0, 2, 5]), ValueError, "indices: got 4 pages, wanted at least 5, the end of indptr"),
    (dict(indices=[0, -1, 2, 3]), ValueError, "indices: got -1, wanted at least 0"),
    (dict(last_page_len=[3, 0]), ValueError, r"last_page_len\[1\]: got 0, wanted 1 to 16, the page_size"),
    (dict(last_page_len=[17, 2]), ValueError, r"last_page_len\[0\]: got 17, wanted 1 to 16, the page_size"),
    (dict(indptr=torch.zeros(3)), TypeError, "indptr: got torch.float32, wanted torch.int32 or other integers"),
    (dict(indptr=META), ValueError, "indptr: got a meta tensor, wanted a tensor with elements"),
    (dict(indices=META), ValueError, "indices: got a meta tensor, wanted a tensor with elements"),
    (dict(indices=None), TypeError, "indices: got NoneType, wanted Tensor"),
    (dict(last_page_len=torch.zeros(2, 1, dtype=torch.int32)), ValueError, r"last_page_len: got shape \[2, 1\], wanted a vector"),
    (dict(indices=torch.tensor([0, 1, 2, 1 << 33])), ValueError, "indices: got 8589934592, wanted -2147483648 to 2147483647"),
    (dict(page_size=5.5), TypeError, "page_size: got 5.5, wanted an integer"),
    (dict(page_size=None), TypeError, "page_size: got NoneType, wanted an integer"),
    (dict(num_qo_heads="4"), TypeError, "num_qo_heads: got str, wanted an integer"),
    (dict(window_left=2.7), TypeError, "plan: window_left: got 2.7, wanted an integer"),
    (dict(fixed_split_size=1.5), TypeError, "fixed_split_size: got 1.5, wanted an integer"),
    (dict(page_size=0), ValueError, "page_size: got 0, wanted a positive number"),
    (dict(page_size=1 << 30), ValueError, "keys of a request, wanted at most 2147483647"),
    (dict(num_qo_heads=7), ValueError, "num_qo_heads: got 7, wanted a multiple of num_kv_heads, 2"),
    (dict(num_kv_heads=0), ValueError, "num_kv_heads: got 0, wanted a positive number"),
    (dict(head_dim=-8), ValueError, "head_dim_qk: got -8, wanted a positive number"),
    (dict(q_data_type="float61"), ValueError, "plan: q_data_type: got 'float61', wanted the name of a torch dtype"),
    (dict(q_data_type=16), TypeError, "q_data_type: got int, wanted a torch.dtype or its name"),
    (dict(kv_data_type="float61"), ValueError, "plan: kv_data_type: got 'float61', wanted the name"),
    (dict(o_data_type="float61"), ValueError, "plan: o_data_type: got 'float61', wanted the name"),
    (dict(q_data_type="int8"), ValueError, "plan: q_data_type: got int8, wanted one of"),
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
    (dict(q=torch.ones(2, 8, 64).half()), ValueError, r"q: got 8 heads, and plan\(\) was called for 4"),
    (dict(q=torch.ones(2, 64).half()), ValueError, "q: got 2 dimensions, wanted 3"),
    (dict(q=torch.ones(2, 4, 64).bfloat16()), TypeError, r"q: got torch.bfloat16, and plan\(\) was called for torch.float16"),
    (dict(paged_kv_cache=torch.ones(4, 2, 16, 2, 64)), TypeError, r"paged_kv_cache: got torch.float32, and plan\(\) was called for torch.float16"),
    (dict(paged_kv_cache=torch.ones(4, 2, 8, 2, 64).half()), ValueError, r"paged_kv_cache: got 8 slots in a page, and plan\(\) was called for 16"),
    (dict(paged_kv_cache=torch.ones(4, 2, 16, 4, 64).half()), ValueError, r"paged_kv_cache: got 4 heads, and plan\(\) was called for 2"),
    (dict(paged_kv_cache=torch.ones(3, 2, 16, 2, 64).half()), ValueError, r"paged_kv_cache: got 3 pages, wanted at least 4 for the tables of plan\(\)"),
    (dict(paged_kv_cache=torch.ones(4, 3, 16, 2, 64).half()), ValueError, r"paged_kv_cache: got shape \[4, 3, 16, 2, 64\], wanted \[any, 2, any, any, any\]"),
    (dict(paged_kv_cache=torch.ones(4, 16, 2, 64).half()), ValueError, "paged_kv_cache: got 4 dimensions, wanted 5"),
    (dict(paged_kv_cache=None), TypeError, "paged_kv_cache: got NoneType, wanted a list or tuple of keys and values"),
    (dict(paged_kv_cache=(torch.ones(4, 16, 2, 64).half(),)), ValueError, "paged_kv_cache: got 1, wanted 2, keys and values"),
    (dict(out=torch.ones(2, 4, 32).half()), ValueError, r"out: got shape \[2, 4, 32\], wanted \[2, 4, 64\]"),
    (dict(out=torch.ones(2, 4, 64)), TypeError, "out: got torch.float32, wanted torch.float16"),
    (dict(lse=torch.ones(2, 2)), ValueError, r"lse: got shape \[2, 2\], wanted \[2, 4\]"),
    (dict(lse=torch.ones(2, 4).half()), TypeError, "lse: got torch.float16, wanted torch.float32"),
    (dict(k_scale=torch.ones(3)), ValueError, r"k_scale: got shape \[3\]"),
    (dict(v_scale="a"), TypeError, "v_scale: got str, wanted a number"),
    (dict(window_left="a"), TypeError, "run: window_left: got str, wanted an integer"),
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


def test_strides_that_kernels_cannot_read(device):
    """A copy of a cache or of an output would not help."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 2, 4]), int32([0, 1, 2, 3]), int32([3, 16]), 4, 2, 64, 16)
    q, cache = torch.ones(2, 4, 64, device=device).half(), torch.ones(4, 2, 16, 2, 128, device=device).half()
    with pytest.raises(ValueError, match="paged_kv_cache: got stride 2 of the last dimension, wanted 1"):
        wrapper.run(q, cache[..., ::2])
    cache = cache[..., :64]
    with pytest.raises(ValueError, match="out: got stride 2 of the last dimension, wanted 1"):
        wrapper.run(q, cache, out=torch.ones(2, 4, 128, device=device).half()[..., ::2])
    with pytest.raises(ValueError, match="lse: is not contiguous"):
        wrapper.run(q, cache, lse=torch.ones(2, 8, device=device)[:, ::2])
    if device == "cuda":
        padded = torch.ones(4, 2, 16, 2, 72, device=device).half()
        with pytest.raises(ValueError, match="paged_kv_cache: got rows that do not start at multiples of 16 bytes"):
            wrapper.run(q, padded[..., 4:68])


def test_too_many_arguments_of_a_variant(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 1]), int32([0]), int32([3]), 4, 2, 64, 16)
    with pytest.raises(TypeError, match="got 1 more arguments, wanted none without jit_args"):
        wrapper.run(torch.ones(1, 4, 64, device=device).half(), torch.ones(1, 2, 16, 2, 64, device=device).half(), 0.5)


# Prefill

HALF = dict(dtype=torch.float16)
BAD_SINGLE_PREFILL = [
    (dict(q=torch.ones(4, 64, **HALF)), ValueError, "q: got 2 dimensions, wanted 3"),
    (dict(v=torch.ones(5, 64, **HALF)), ValueError, "v: got 2 dimensions, wanted 3"),
    (dict(k=None), TypeError, "k: got NoneType, wanted Tensor"),
    (dict(k=torch.ones(5, 3, 64, **HALF)), ValueError, "q: got 4 heads, wanted a multiple of the 3 heads of k"),
    (dict(v=torch.ones(6, 2, 64, **HALF)), ValueError, r"v: got shape \[6, 2, 64\], wanted \[5, 2, any\]"),
    (dict(v=torch.ones(5, 2, 64)), TypeError, "v: got float32, wanted float16 as k has"),
    (dict(o_dtype=torch.int8), ValueError, "cache: o_dtype: got int8, wanted one of"),
    (dict(backend="fa4"), ValueError, "cache: backend: got 'fa4', wanted one of auto, fa2, fa3"),
    (dict(backend="fa3", custom_mask=torch.ones(3, 5).bool()), ValueError, "cache: backend: got 'fa3', whose kernels do not"),
    (dict(kv_layout="BSHD"), ValueError, "kv_layout: got 'BSHD', wanted 'NHD' or 'HND'"),
    (dict(pos_encoding_mode=1), ValueError, "pos_encoding_mode: got 1, wanted 'NONE', 'ROPE_LLAMA' or 'ALIBI'"),
    (dict(custom_mask=torch.ones(3, 4).bool()), ValueError, r"custom_mask: got shape \[3, 4\], wanted \[3, 5\] or \[15\]"),
    (dict(custom_mask=torch.ones(5, 3).bool()), ValueError, r"custom_mask: got shape \[5, 3\], wanted \[3, 5\] or \[15\]"),
    (dict(custom_mask=torch.ones(2, 3, 5).bool()), ValueError, r"custom_mask: got shape \[2, 3, 5\], wanted \[3, 5\] or"),
    (dict(custom_mask=torch.ones(14).bool()), ValueError, r"custom_mask: got shape \[14\], wanted \[3, 5\] or \[15\]"),
    (dict(custom_mask=torch.ones(3, 5)), TypeError, "custom_mask: got torch.float32, wanted torch.bool"),
    (dict(custom_mask=torch.ones(3, 5, device="meta").bool()), ValueError, "custom_mask: got a meta tensor"),
    (dict(custom_mask=[True] * 15), TypeError, "custom_mask: got list, wanted Tensor"),
    (dict(packed_custom_mask=torch.ones(1, dtype=torch.uint8)), ValueError, "packed_custom_mask: got 1 bytes, wanted at least 2"),
    (dict(packed_custom_mask=torch.ones(2)), TypeError, "packed_custom_mask: got torch.float32, wanted torch.uint8"),
    (dict(scale_q=torch.ones(2)), ValueError, r"cache: scale_q: got shape \[2\], wanted one number or \[4\]"),
    (dict(scale_k="a"), TypeError, "cache: scale_k: got str, wanted a number"),
    (dict(scale_v=torch.ones(3)), ValueError, r"cache: scale_v: got shape \[3\], wanted one number or \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD_SINGLE_PREFILL)
def test_bad_single_prefill(change, error, message, device):
    arguments = (
        dict(q=torch.ones(3, 4, 64, **HALF), k=torch.ones(5, 2, 64, **HALF), v=torch.ones(5, 2, 64, **HALF)) | change
    )
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x  # noqa: E731
    with pytest.raises(error, match=message):
        flashinfer.single_prefill_with_kv_cache(**{n: move(x) for n, x in arguments.items()})


ITEMS = dict(
    prefix_len_ptr=torch.tensor([2, 2], dtype=torch.int32).to(torch.uint32),
    token_pos_in_items_ptr=torch.zeros(8, dtype=torch.int32).to(torch.uint16),
    token_pos_in_items_len=4,
    max_item_len_ptr=torch.tensor([3, 3], dtype=torch.int32).to(torch.uint16),
)
BAD_PREFILL_PLAN = [
    (dict(qo_indptr=[-1, 2, 3]), ValueError, "qo_indptr: got -1 first, wanted 0 or more"),
    (dict(qo_indptr=[0, 5, 3]), ValueError, "qo_indptr: got 3 at 2 after 5, wanted numbers that never decrease"),
    (dict(kv_indptr=[0, 5]), ValueError, "kv_indptr: got 2 elements, wanted 3, one more than requests"),
    (dict(kv_indptr=[0, 7, 6]), ValueError, "kv_indptr: got 6 at 2 after 7"),
    (dict(qo_indptr=torch.zeros(3)), TypeError, "qo_indptr: got torch.float32, wanted torch.int32"),
    (dict(num_qo_heads=3), ValueError, "num_qo_heads: got 3, wanted a multiple of num_kv_heads, 2"),
    (dict(head_dim_vo=0), ValueError, "head_dim_vo: got 0, wanted a positive number"),
    (dict(head_dim_vo=512 + 8), ValueError, "plan: head_dim: got 64:520, wanted"),
    (dict(kv_data_type="int32"), ValueError, "plan: kv_data_type: got int32, wanted one of"),
    (dict(rope_theta=0), ValueError, "rope_theta: got 0.0, wanted a positive number"),
    (dict(max_sequence_kv="a"), TypeError, "max_sequence_kv: got str, wanted an integer"),
    (dict(custom_mask=torch.ones(18, device="meta").bool()), ValueError, "custom_mask: got a meta tensor"),
    (dict(custom_mask=torch.ones(17).bool()), ValueError, r"custom_mask: got shape \[17\], wanted \[18\]"),
    (dict(custom_mask=torch.ones(6, 3).bool()), ValueError, r"custom_mask: got shape \[6, 3\], wanted \[18\]"),
    (dict(packed_custom_mask=torch.ones(2, dtype=torch.uint8)), ValueError, "packed_custom_mask: got 2 bytes, wanted at least 3"),
    (dict(custom_mask=torch.ones(18).bool(), **ITEMS), ValueError, "custom_mask: got both, wanted only custom_mask or only prefix_len_ptr"),
    (dict(ITEMS, max_item_len_ptr=None), ValueError, "max_item_len_ptr: got None, wanted all or none of prefix_len_ptr, "),
    (dict(ITEMS, prefix_len_ptr=None), ValueError, "prefix_len_ptr: got None, wanted all or none of"),
    (dict(ITEMS, prefix_len_ptr=torch.ones(2)), TypeError, "prefix_len_ptr: got torch.float32, wanted torch.uint32"),
    (dict(ITEMS, token_pos_in_items_len=3), ValueError, "token_pos_in_items_ptr: got 8 elements, wanted 3 to 6"),
    (dict(ITEMS, token_pos_in_items_len=9), ValueError, "token_pos_in_items_ptr: got 8 elements, wanted 9 to 18"),
    (dict(ITEMS, token_pos_in_items_len=3.5), TypeError, "token_pos_in_items_len: got 3.5, wanted an integer"),
    (dict(ITEMS, token_pos_in_items_len=-1), ValueError, "token_pos_in_items_len: got -1, wanted at least 0"),
    (dict(ITEMS, prefix_len_ptr=torch.tensor([0, 2], dtype=torch.int32).to(torch.uint32)), ValueError,
     "token_pos_in_items_len: got 4, wanted at least 5, the largest number of keys after"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD_PREFILL_PLAN)
def test_bad_prefill_plan(change, error, message, device):
    arguments = dict(qo_indptr=[0, 2, 4], kv_indptr=[0, 5, 9], num_qo_heads=4, num_kv_heads=2, head_dim_qk=64) | change
    arguments = {n: int32(x) if isinstance(x, list) else x for n, x in arguments.items()}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    with pytest.raises(error, match=message):
        wrapper.plan(**arguments)
    x = torch.ones(9, 2, 64, device=device, **HALF)
    with pytest.raises(ValueError, match=r"run: got no plan, wanted a call of plan\(\) before"):
        wrapper.run(torch.ones(4, 4, 64, device=device, **HALF), x, x)
    with pytest.raises(ValueError, match="forward: got no plan"):
        wrapper.forward(torch.ones(4, 4, 64, device=device, **HALF), x, x)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(paged_kv_last_page_len=[5]), ValueError, "paged_kv_last_page_len: got 1 elements, wanted 2"),
        (dict(qo_indptr=[0, 2]), ValueError, "qo_indptr: got 2 elements, wanted 3 as paged_kv_indptr has"),
        (
            dict(paged_kv_indices=[0]),
            ValueError,
            "paged_kv_indices: got 1 pages, wanted at least 2, the end of paged_kv_indptr",
        ),
        (dict(paged_kv_last_page_len=[5, 0]), ValueError, r"paged_kv_last_page_len\[1\]: got 0, wanted 1 to"),
    ],
)
def test_bad_paged_prefill_plan(change, error, message, device):
    arguments = dict(qo_indptr=[0, 2, 4], paged_kv_indptr=[0, 1, 2], paged_kv_indices=[0, 1],
                     paged_kv_last_page_len=[5, 4]) | change  # fmt: skip
    arguments = {n: int32(x) for n, x in arguments.items()}
    with pytest.raises(error, match=message):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)).plan(
            **arguments, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, page_size=16
        )


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=torch.ones(5, 4, 64, **HALF)), ValueError, r"q: got 5 queries, and plan\(\) was called for 4"),
        (dict(q=torch.ones(4, 2, 64, **HALF)), ValueError, r"q: got 2 heads, and plan\(\) was called for 4"),
        (dict(k=torch.ones(8, 2, 64, **HALF)), ValueError, r"k: got 8 rows of keys, wanted at least 9 for the tables of plan\(\)"),
        (dict(k=torch.ones(9, 1, 64, **HALF)), ValueError, "k: got 1 heads"),
        (dict(v=torch.ones(9, 2, 32, **HALF)), ValueError, r"v: got 32 elements in a head, and plan\(\) was called for 64"),
        (dict(v=torch.ones(9, 1, 64, **HALF)), ValueError, r"v: got shape \[9, 1, 64\], wanted \[9, 2, any\]"),
        (dict(k=torch.ones(9, 64, **HALF)), ValueError, "k: got 2 dimensions, wanted 3"),
        (dict(k=torch.ones(9, 2, 64)), TypeError, r"k: got torch.float32, and plan\(\) was called for torch.float16"),
        (dict(out=torch.ones(4, 4, 64)), TypeError, "out: got torch.float32, wanted torch.float16"),
        (dict(lse=torch.ones(4)), ValueError, r"lse: got shape \[4\], wanted \[4, 4\]"),
    ],
)  # fmt: skip
def test_bad_prefill_run(change, error, message, device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 2, 4]), int32([0, 5, 9]), 4, 2, 64)
    arguments = (
        dict(q=torch.ones(4, 4, 64, **HALF), k=torch.ones(9, 2, 64, **HALF), v=torch.ones(9, 2, 64, **HALF)) | change
    )
    with pytest.raises(error, match=message):
        wrapper.run(**{n: x.to(device) for n, x in arguments.items()})


def test_numbers_beyond_int32(device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="qo_indptr: got more than 2147483647 rows"):
        wrapper.plan(int32([0, 2**31 - 1]), int32([0, 1]), 4, 2, 64)
    with pytest.raises(ValueError, match="custom_mask: got 4294967296 elements in all, wanted at most 2147483647"):
        wrapper.plan(int32([0, 1 << 16]), int32([0, 1 << 16]), 4, 2, 64, custom_mask=torch.ones(8).bool())


def test_devices_without_kernels():
    x = torch.ones(3, 2, 64, device="meta").half()
    with pytest.raises(ValueError, match="cache: q: got a tensor on meta, wanted one on cpu or cuda"):
        flashinfer.single_prefill_with_kv_cache(x, x, x)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device="meta"))
    with pytest.raises(
        ValueError, match="plan: float_workspace_buffer: got a tensor on meta, wanted one on cpu or cuda"
    ):
        wrapper.plan(int32([0, 3]), int32([0, 3]), 2, 2, 64)


def test_an_output_that_overlaps_an_input(device):
    q, k = torch.ones(4, 4, 64, device=device, **HALF), torch.ones(9, 2, 64, device=device, **HALF)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 2, 4]), int32([0, 5, 9]), 4, 2, 64)
    with pytest.raises(ValueError, match="out: overlaps the memory of q"):
        wrapper.run(q, k, k, out=q)


@pytest.mark.parametrize("kind", ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"])
def test_backends_of_wrappers(kind, device):
    with pytest.raises(ValueError, match="backend: got 'fa4', wanted 'auto', 'fa2' or 'fa3'"):
        getattr(flashinfer, kind)(workspace(device), backend="fa4")
    with pytest.raises(TypeError, match="qo_indptr_buf: got NoneType, wanted Tensor"):
        getattr(flashinfer, kind)(workspace(device), use_cuda_graph=True)
    with pytest.raises(
        TypeError, match=f"{kind}: jit_args: got str, wanted a list or tuple of a generator's arguments"
    ):
        getattr(flashinfer, kind)(workspace(device), jit_args="fa2")
    if "Prefill" in kind:
        with pytest.raises(ValueError, match=f"{kind}: jit_kwargs: got dict, wanted None: there are no jit_args"):
            getattr(flashinfer, kind)(workspace(device), jit_kwargs={})


def test_a_backend_passed_as_jit_args(device):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    with pytest.raises(
        TypeError, match=f"{name}: jit_args: got str, wanted a list or tuple of a generator's arguments"
    ):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", False, False, None, None, None, "fa2")


def test_utils():
    assert flashinfer.utils.canonicalize_torch_dtype("bfloat16") == torch.bfloat16
    assert flashinfer.utils.is_float8(torch.ones(1).to(torch.float8_e5m2)) and not flashinfer.utils.is_float8(
        torch.ones(1)
    )
    assert flashinfer.utils.version_at_least("2.10.0+cu130", "2.9") and not flashinfer.utils.version_at_least(
        "2.4", "2.10"
    )
    cpu = torch.device("cpu")
    assert not flashinfer.utils.is_sm90a_supported(cpu) and not flashinfer.utils.is_sm100a_supported(cpu)
    assert flashinfer.utils.determine_attention_backend(cpu, 0, False, False, torch.float16, torch.float16) == "fa2"
    with pytest.raises(ValueError, match="device: got cpu, wanted a CUDA device"):
        flashinfer.utils.get_compute_capability(cpu)
