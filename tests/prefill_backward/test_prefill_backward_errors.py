"""Errors of calls without a gradient, and of the kernel of gradients."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.attention_modules import HOOKS
from ..support.attention_oracle import drawn, int32, workspace
from .test_prefill_backward import Ragged, small_place, tensors


def test_without_gradients_nothing_changes(device):
    place = small_place(device)
    leaves = tensors(place, 40, 60, (4, 2))
    out, lse = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, return_lse=True)
    plain = flashinfer.single_prefill_with_kv_cache(*(x.detach() for x in leaves), causal=True, return_lse=True)
    with torch.no_grad():
        same = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, return_lse=True)
    for got in (plain, same):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse) and not got[0].requires_grad
    batch = Ragged(place, [5, 30], [50, 31], (4, 2))
    with torch.no_grad():
        got = batch.run()
    assert torch.equal(got[0], batch.run()[0]) and not got[0].requires_grad


def test_second_derivatives_are_an_error(device):
    leaves = tensors(small_place(device), 9, 12, (4, 2))
    out = flashinfer.single_prefill_with_kv_cache(*leaves)
    (once,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(GradientError, match="attention: has no gradient: second derivatives are not implemented"):
        torch.autograd.grad(once.float().sum(), leaves[0])


def test_single_prefill_without_a_gradient(device):
    q, k, v = tensors(small_place(device), 9, 12, (4, 2))
    attend = flashinfer.single_prefill_with_kv_cache
    with pytest.raises(GradientError, match="has no gradient with scale_q, scale_k or scale_v"):
        attend(q, k, v, scale_k=2.0)
    quantised = k.detach().to(torch.float8_e4m3fn)
    with pytest.raises(GradientError, match="has no gradient with k of torch.float8_e4m3fn"):
        attend(q, quantised, quantised)
    attend(q.detach(), quantised, quantised)
    with pytest.raises(GradientError, match="single_decode_with_kv_cache: has no gradient"):
        flashinfer.single_decode_with_kv_cache(q[0], k, v)


def test_wrappers_without_a_gradient(device):
    dtype = small_place(device)[1]
    q = drawn((4, 4, 64), dtype, device).requires_grad_()
    cache = drawn((3, 2, 8, 2, 64), dtype, device)
    pages = int32([0, 2, 3]), int32([0, 1, 2]), int32([5, 4])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.plan(int32([0, 3, 4]), *pages, 4, 2, 64, 8, q_data_type=dtype)
    with pytest.raises(GradientError, match="BatchPrefillWithPagedKVCacheWrapper.run: has no gradient, wanted tensors"):
        prefill.run(q, cache)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*pages, 4, 2, 64, 8, q_data_type=dtype)
    with pytest.raises(GradientError, match="BatchDecodeWithPagedKVCacheWrapper.run: has no gradient"):
        decode.run(q[:2], cache)
    with torch.no_grad():
        assert not prefill.run(q, cache).requires_grad and not decode.run(q[:2], cache).requires_grad


def test_bad_batches(device):
    place = small_place(device)
    batch = Ragged(place, [5, 30], [50, 31], (4, 2))
    q, k, v = batch.leaves
    for wrong, error, message in (
        (None, TypeError, "q: got NoneType, wanted Tensor"),
        (q[1:], ValueError, "q: got 34 queries, and plan\\(\\) was called for 35"),
        (q.double(), TypeError, "q: got torch.float64, and plan"),
    ):
        with pytest.raises(error, match=f"BatchPrefillWithRaggedKVCacheWrapper.run: {message}"):
            batch.wrapper.run(wrong, k, v)
    with pytest.raises(TypeError, match=r"run: got 1 more arguments, wanted none without jit_args"):
        batch.wrapper.run(q, k, v, 3)


def test_multi_item_scoring_has_no_gradient(device):
    place = small_place(device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(
        int32([0, 6]), int32([0, 6]), 4, 2, 64, q_data_type=place[1],
        prefix_len_ptr=torch.tensor([2], dtype=torch.uint32), max_item_len_ptr=torch.tensor([3], dtype=torch.uint16),
        token_pos_in_items_ptr=torch.tensor([0, 1, 2, 3], dtype=torch.uint16), token_pos_in_items_len=4,
    )  # fmt: skip
    with pytest.raises(GradientError, match="run: has no gradient with multi-item scoring: wanted a custom mask"):
        wrapper.run(*tensors(place, 6, 6, (4, 2)))


def test_custom_variants_have_no_gradient():
    q, k, v = tensors(("cpu", torch.float32, (64, 64)), 3, 5, (4, 2))
    names = (
        ["maybe_bias", "documents"],
        ["float", "int32_t"],
        ["sm_scale", "limit", "period"],
        ["double"] * 2 + ["int64_t"],
    )
    arguments = ("hooks_without_gradient", torch.float32, torch.float32, torch.float32, 64, 64)
    spec = flashinfer.gen_customize_single_prefill_module("auto", *arguments, *names, "Hooks", HOOKS, device="cpu")
    own = None, torch.zeros(5, dtype=torch.int32), 0.3, 100.0, 3
    with pytest.raises(GradientError, match="with_jit_module: has no gradient, wanted tensors that require none"):
        flashinfer.single_prefill_with_kv_cache_with_jit_module(spec.build_and_load(), q, k, v, *own)


def test_bad_input_in_float64():
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 8), (5, 2, 8), (5, 2, 8)))
    attend = flashinfer.single_prefill_with_kv_cache
    for arguments, error, message in (
        ((q[:, :3], k, v), ValueError, "q: got 3, wanted a multiple of the heads of k, 2"),
        ((q, k[..., :6], v), ValueError, r"k: got shape \[5, 2, 6\], wanted \[5, 2, 8\]"),
        ((q, k, v[:4]), ValueError, r"v: got shape \[4, 2, 8\], wanted \[5, 2, any\]"),
        ((q, k.float(), v), TypeError, "k: got torch.float32, wanted torch.float64 as q has"),
    ):
        with pytest.raises(error, match=f"single_prefill_with_kv_cache: {message}"):
            attend(*arguments)
    with pytest.raises(ValueError, match="o_dtype: got torch.float32, wanted None or torch.float64 as q has"):
        attend(q, k, v, o_dtype=torch.float32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(grad=torch.ones(3, 4, 7)), ValueError, r"grad: got shape \[3, 4, 7\], wanted \[3, 4, 8\]"),
        (dict(k=torch.ones(5, 2, 8).half()), TypeError, "k: got float16, wanted float32 as q has"),
        (dict(k=torch.ones(5, 3, 8)), ValueError, "q: wanted a multiple of the heads of k"),
        (dict(lse=torch.ones(3, 4).double()), TypeError, "lse: got float64, wanted float32"),
        (dict(grad_lse=torch.ones(4, 3).t()), ValueError, "grad_lse: is not contiguous"),
        (dict(out=torch.ones(3, 4, 9)), ValueError, r"out: got shape \[3, 4, 9\], wanted \[3, 4, 8\]"),
        (dict(out=torch.ones(3, 4, 8).half()), TypeError, "out: got float16, wanted float32 as q has"),
        (dict(layout=2), ValueError, "layout: wanted 0"),
        (dict(mask_mode=3), ValueError, "mask_mode: wanted 0 to 2"),
        (dict(mask_mode=2), ValueError, "packed_mask: got none, wanted one"),
        (dict(mask_mode=2, mask=torch.ones(1, dtype=torch.uint8)), ValueError, "packed_mask: got 1 bytes, wanted 2"),
        (dict(qo_indptr=int32([0, 3])), ValueError, "kv_lens: wanted one with qo_indptr"),
        (dict(qo_indptr=int32([0, 4]), kv_lens=int32([5])), ValueError, "qo_indptr: leads out of q at request 0"),
        (dict(qo_indptr=int32([0, 3]), kv_lens=int32([6])), ValueError, "kv_lens: got more keys than k has"),
        (dict(qo_indptr=int32([0]), kv_lens=int32([5])), ValueError, "qo_indptr: got 1 elements, wanted 2"),
    ],
)
def test_bad_input_of_the_kernel(change, error, message):
    arguments = dict(
        q=torch.ones(3, 4, 8), k=torch.ones(5, 2, 8), v=torch.ones(5, 2, 8), out=torch.ones(3, 4, 8),
        lse=torch.zeros(3, 4), grad=torch.ones(3, 4, 8), grad_lse=torch.zeros(3, 4), qo_indptr=None, kv_lens=None, mask=None, slopes=None, layout=0,
        mask_mode=0, window_left=-1, logits_soft_cap=0.0, sm_scale=1.0,
    ) | change  # fmt: skip
    with pytest.raises(RuntimeError, match=f"{error.__name__}: prefill_backward: {message}"):
        torch.ops.flashinfer.prefill_backward(*arguments.values())


@pytest.mark.parametrize(
    "sizes, dtype, error, message",
    [
        ((8, 8), torch.float32, TypeError, "q: got float32, wanted float16 or bfloat16"),
        ((264, 8), torch.float16, ValueError, "q: got head_dim 264, wanted a multiple of 8 up to 256 on CUDA"),
        ((8, 12), torch.float16, ValueError, "v: got head_dim 12, wanted a multiple of 8 up to 256 on CUDA"),
    ],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bad_input_of_the_cuda_kernel(sizes, dtype, error, message):
    rows = torch.zeros(3, 4, device="cuda")
    problem = None, None, None, None, 0, 0, -1, 0.0, 1.0

    def run(sizes, dtype, *problem, **change):
        q, k, v, out = (
            torch.ones(*shape, dtype=dtype, device="cuda")
            for shape in ((3, 4, sizes[0]), (5, 2, sizes[0]), (5, 2, sizes[1]), (3, 4, sizes[1]))
        )
        given = dict(q=q, k=k, v=v, out=out, lse=rows, grad=out, grad_lse=rows) | change
        torch.ops.flashinfer.prefill_backward(*given.values(), *problem)

    with pytest.raises(RuntimeError, match=f"{error.__name__}: prefill_backward: {message}"):
        run(sizes, dtype, *problem)
    shifted = torch.ones(5 * 2 * 8 + 1, dtype=torch.float16, device="cuda")[1:].view(5, 2, 8)
    with pytest.raises(RuntimeError, match="k: got rows that do not start at multiples of 16 bytes"):
        run((8, 8), torch.float16, *problem, k=shifted)
    with pytest.raises(RuntimeError, match="packed_mask: is on cpu, another device than q's cuda:0"):
        mask = torch.ones(2, dtype=torch.uint8)
        run((8, 8), torch.float16, None, None, mask, None, 0, 2, -1, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="qo_indptr: got a tensor of a device, wanted the CPU"):
        on_device = [int32([0, 3]).cuda(), int32([5]).cuda()]
        run((8, 8), torch.float16, *on_device, None, None, 0, 0, -1, 0.0, 1.0)


def test_element_types_of_the_kernels():
    with pytest.raises(ValueError, match="dtypes: got float32, wanted float16 or bfloat16 on cuda"):
        flashinfer.gen_prefill_backward_module("cuda", ["float32"])
    assert dict(flashinfer.gen_prefill_backward_module("cuda").coverage)["dtype"] == ("bfloat16", "float16")
    assert dict(flashinfer.gen_prefill_backward_module("cpu").coverage)["dtype"] == ("bfloat16", "float16", "float32")
