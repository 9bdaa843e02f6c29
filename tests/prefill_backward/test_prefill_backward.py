"""Gradients of single and ragged prefill against autograd of the oracle in float64."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import flashinfer

from ..conftest import DEVICES, no_synchronisation
from ..support.attention_oracle import assert_near, attention, batch_attention, drawn, indptr_of, workspace
from ..support.oracle import check_bits_for_any_threads

# Largest error of a gradient's row, relative to the norm of the largest row, for logits of spread 1. For
# float32: a logit's products add up to about 10, and half a unit in the last place for each of ten sums is
# 6e-6.
TOLERANCE = {torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLACES = [
    (device, dtype, dims)
    for device in DEVICES
    for dtype, dims in (
        (torch.float32, (64, 64)), (torch.float32, (72, 24)), (torch.float16, (64, 64)), (torch.bfloat16, (192, 128)),
    )
    if device == "cpu" or (dtype != torch.float32)
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(causal=True),
    dict(window_left=5),
    dict(causal=True, window_left=0),
    dict(causal=True, window_left=33, sm_scale=0.3),
    dict(causal=True, logits_soft_cap=3.0),
    dict(mask=0.3),
    dict(mask=0.02, window_left=40),
    dict(mask=0.5, logits_soft_cap=3.0),
    dict(causal=True, pos_encoding_mode="ALIBI"),
    dict(pos_encoding_mode="ALIBI", logits_soft_cap=8.0),
    dict(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=1e3),
]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}-{place[2][0]}".replace("torch.", ""))
def place(request):
    return request.param


def small_place(device: str) -> tuple[str, torch.dtype, tuple[int, int]]:
    return device, torch.float32 if device == "cpu" else torch.float16, (64, 64)


def tensors(place, qo_len: int, kv_len: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    device, dtype, (qk, vo) = place
    shapes = (qo_len, heads[0], qk), (kv_len, heads[1], qk), (kv_len, heads[1], vo)
    return [drawn(shape, dtype, device).requires_grad_() for shape in shapes]


def with_mask(given: dict[str, Any], qo_len: int, kv_len: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our options and the oracle's."""
    if "mask" not in given:
        return given, given
    mask = torch.rand(qo_len, kv_len, device=device) < given["mask"]
    rest = {key: value for key, value in given.items() if key != "mask"}
    return rest | dict(custom_mask=mask), rest | dict(mask=mask)


def wide(tensors_: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors_]


def gradients(results, leaves, grads) -> list[torch.Tensor]:
    pairs = [(out, grad.to(out)) for out, grad in zip(results, grads, strict=True) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad([a for a, _ in pairs], leaves, [b for _, b in pairs], allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]


def spread_of(options: dict[str, Any], head_dim: int) -> float:
    """Return the spread of the logits, 1 by default, which scales the error of the weights.

    The softmax of a single key has a difference of equal numbers for any logit.
    """
    if options.get("window_left") == 0:
        return 4.0
    return max(1.0, options.get("sm_scale", 0.0) * math.sqrt(head_dim))


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor], spread: float = 1.0) -> None:
    for one, value in zip(got, want, strict=True):
        assert one.shape == value.shape
        error = (one.cpu().double() - value.cpu()).norm(dim=-1)
        largest = value.detach().cpu().norm(dim=-1).amax() if value.numel() else 0.0
        # A single key again.
        limit = (
            TOLERANCE[one.dtype] * spread * (max(largest, 4.0) if value.shape[0] == 1 or largest < 1e-9 else largest)
        )
        assert bool((error <= limit).all()), f"error {error.max():.3g}, limit {limit:.3g}, NaN: {one.isnan().any()}"


def check(place, lengths: tuple[int, int], heads: tuple[int, int], layout: str = "NHD", **given) -> None:
    leaves = tensors(place, *lengths, heads)
    ours, theirs = with_mask(given, *lengths, place[0])
    q, k, v = leaves if layout == "NHD" else (leaves[0], *(x.transpose(0, 1) for x in leaves[1:]))
    results = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, kv_layout=layout, **ours)
    oracle = wide(leaves)
    want = attention(*oracle, **theirs)
    assert_near(results[0], want[0].detach(), results[1], want[1].detach())
    grads = [torch.randn(result.shape) for result in want]
    grads[1] *= want[1].detach().isfinite()  # a query without keys passes on no gradient
    grads[0] = grads[0].to(place[1]).double()
    assert_close(gradients(results, leaves, grads), gradients(want, oracle, grads), spread_of(given, place[2][0]))


# One request


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)], ids=str)
def test_single(heads, layout, causal, place):
    for lengths in ((1, 1), (random.randint(2, 70), random.randint(70, 300)), (33, 5), (3, 700)):
        check(place, lengths, heads, layout, causal=causal)


@options
def test_single_options(options, device):
    for lengths in ((70, 200), (150, 140)):
        check(small_place(device), lengths, (6, 2), **options)


def test_many_blocks(device):
    """More keys and rows than a tile, so that the kernel adds up tiles."""
    for given in (dict(), dict(causal=True), dict(causal=True, window_left=300), dict(mask=0.1)):
        check(small_place(device), (random.randint(500, 600), random.randint(1100, 1700)), (2, 1), **given)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(lengths, place):
    leaves = tensors(place, *lengths, (4, 2))
    out, lse = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, return_lse=True)
    grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(grad.shape == leaf.shape and bool((grad == 0).all()) for grad, leaf in zip(grads, leaves, strict=True))


def test_rows_that_see_no_key_have_no_gradient(place):
    """Queries before the first key, and a key that no query sees, have gradient 0."""
    leaves = tensors(place, 20, 6, (4, 2))
    out, lse = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, window_left=1, return_lse=True)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert bool((dq[:14] == 0).all()) and bool(dq[14:].any()) and not any(bool(x.isnan().any()) for x in (dq, dk, dv))
    mask = torch.ones(20, 6, dtype=torch.bool, device=leaves[0].device)
    mask[:, 3], mask[7] = False, False
    out = flashinfer.single_prefill_with_kv_cache(*leaves, custom_mask=mask)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), leaves)
    assert bool((dk[3] == 0).all()) and bool((dv[3] == 0).all()) and bool((dq[7] == 0).all())
    assert bool(dv[2].any()) and not any(bool(x.isnan().any()) for x in (dq, dk, dv))


def test_strides_of_inputs_and_gradients(device):
    """Rows inside larger tensors, a last dimension that is not contiguous, an expanded gradient."""
    place = small_place(device)
    dtype = place[1]
    padded = [torch.full((40, heads, 64 + 16), math.nan, dtype=dtype, device=device) for heads in (4, 2, 2)]
    views = [x[3:-5, :, 8:72].copy_(drawn((32, x.shape[1], 64), dtype)) for x in padded]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in views]
    found = []
    for inputs in (views, turned, dense):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True)
        out.sum().backward()  # expanded from one element
        found.append([leaf.grad for leaf in leaves])
        again = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True)
        ones = torch.ones_like(again).transpose(0, 2).contiguous().transpose(0, 2)
        found.append(list(torch.autograd.grad(again, leaves, ones)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert all(bool(x[:3].isnan().all()) and bool(x[..., :8].isnan().all()) for x in padded)


def test_only_tensors_that_require_a_gradient_get_one(device):
    q, k, v = tensors(small_place(device), 9, 12, (4, 2))
    out = flashinfer.single_prefill_with_kv_cache(q, k.detach(), v.detach())
    (dq,) = torch.autograd.grad(out.sum(), q)
    want = torch.autograd.grad(flashinfer.single_prefill_with_kv_cache(q, k, v).sum(), q)[0]
    assert torch.equal(dq, want)


def test_another_dtype_of_the_output(device):
    place = (device, torch.float16, (64, 64))
    leaves = tensors(place, 30, 50, (4, 2))
    out = flashinfer.single_prefill_with_kv_cache(*leaves, o_dtype=torch.bfloat16, causal=True)
    assert out.dtype == torch.bfloat16
    oracle, grad = wide(leaves), torch.randn(out.shape).bfloat16()
    want = torch.autograd.grad(attention(*oracle, causal=True)[0], oracle, grad.double())
    for got, value in zip(torch.autograd.grad(out, leaves, grad.to(device)), want, strict=True):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.cpu().double(), value.cpu(), rtol=0.03, atol=0.03)


# Batches


class Ragged:
    """A planned wrapper and its leaves, with NaN in extra keys after the last request."""

    def __init__(self, place, qo_lens: list[int], kv_lens: list[int], heads: tuple[int, int], layout: str = "NHD",
                 **given) -> None:  # fmt: skip
        device, dtype, (qk, vo) = place
        self.qo_lens, self.kv_lens, self.layout = qo_lens, kv_lens, layout
        masks = [with_mask(given, q, k, device) for q, k in zip(qo_lens, kv_lens, strict=True)]
        self.masks = [one["mask"] for _, one in masks] if "mask" in given else None
        self.options = {key: value for key, value in given.items() if key != "mask"}
        q, k, v = tensors(place, sum(qo_lens), sum(kv_lens) + 3, heads)
        with torch.no_grad():
            for x in (k, v):
                x[sum(kv_lens) :] = math.nan
        self.leaves = [q, k, v]
        self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
        bits = {} if self.masks is None else dict(custom_mask=torch.cat([mask.flatten() for mask in self.masks]))
        self.wrapper.plan(
            indptr_of(qo_lens),
            indptr_of(kv_lens),
            *heads,
            qk,
            head_dim_vo=vo,
            q_data_type=dtype,
            **self.options,
            **bits,
        )

    def run(self, **where):
        q, k, v = self.leaves
        if self.layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self.wrapper.run(q, k, v, return_lse=True, **where)

    def want(self, oracle: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = oracle
        used = sum(self.kv_lens)
        requests = list(zip(k[:used].split(self.kv_lens), v[:used].split(self.kv_lens), strict=True))
        return batch_attention(q, self.qo_lens, requests, self.masks, **self.options)

    def check(self) -> None:
        results, oracle = self.run(), wide(self.leaves)
        want = self.want(oracle)
        grads = [torch.randn(result.shape) for result in want]
        grads[1] *= want[1].detach().isfinite()
        grads[0] = grads[0].to(results[0].dtype).double()
        got = gradients(results, self.leaves, grads)
        assert_close(got, gradients(want, oracle, grads), spread_of(self.options, self.leaves[0].shape[2]))
        used = sum(self.kv_lens)
        assert bool((got[1][used:] == 0).all()) and bool((got[2][used:] == 0).all())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_ragged(causal, layout, place):
    Ragged(place, [3, 0, 40, 1, 7, 5], [30, 4, 33, 0, 600, 2], (6, 2), layout, causal=causal).check()


@options
def test_ragged_options(options, device):
    Ragged(small_place(device), [31, 0, 1, 90], [50, 3, 0, 70], (6, 2), **options).check()


def test_ragged_results_are_written_to_arguments(device):
    batch = Ragged(small_place(device), [5, 0, 30], [50, 3, 31], (4, 2), causal=True)
    out, lse = batch.run()
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    want = torch.autograd.grad([out, lse], batch.leaves, grads)
    into, into_lse = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    got = batch.run(out=into, lse=into_lse)
    assert got[0] is into and got[1] is into_lse and torch.equal(into, out) and torch.equal(into_lse, lse)
    found = torch.autograd.grad([into, into_lse], batch.leaves, grads)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    with pytest.raises(ValueError, match=r"run: out: got shape \[1, 4, 64\], wanted \[35, 4, 64\]"):
        batch.run(out=into[:1].detach())
    with pytest.raises(TypeError, match=r"run: lse: got torch.float64, wanted torch.float32"):
        batch.run(lse=into_lse.detach().double())


def test_tables_of_a_plan_may_change_before_the_backward_pass(device):
    place = small_place(device)
    qo_indptr, kv_indptr = indptr_of([3, 4]), indptr_of([5, 6])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(qo_indptr, kv_indptr, 4, 2, 64, q_data_type=place[1])
    leaves = tensors(place, 7, 11, (4, 2))
    out = wrapper.run(*leaves)
    want = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    qo_indptr.zero_(), kv_indptr.zero_()
    wrapper.plan(indptr_of([7]), indptr_of([11]), 4, 2, 64, q_data_type=place[1])
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Determinism and streams


def test_the_same_bits_in_every_run(place):
    leaves = tensors(place, 300, 1200, (2, 1))
    out, lse = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, return_lse=True)
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    check_bits_for_any_threads(lambda: torch.autograd.grad([out, lse], leaves, grads, retain_graph=True))


def test_nothing_waits_for_the_gpu(device):
    place = small_place(device)
    batch = Ragged(place, [31, 0, 1, 90], [50, 3, 0, 70], (4, 2), mask=0.5, logits_soft_cap=3.0)
    leaves = tensors(place, 40, 60, (4, 2))

    def run() -> None:
        for out, lse in (
            batch.run(),
            flashinfer.single_prefill_with_kv_cache(*leaves, causal=True, pos_encoding_mode="ALIBI", return_lse=True),
            flashinfer.single_prefill_with_kv_cache(*leaves, pos_encoding_mode="ROPE_LLAMA", return_lse=True),
        ):
            torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])

    run()
    with no_synchronisation(device):
        run()
    assert all(leaf.grad is not None for leaf in (*leaves, *batch.leaves))


def test_threads_that_have_used_no_gpu(device):
    """A fresh thread has no CUDA context, which the driver's tensor maps need."""
    place = small_place(device)
    leaves = tensors(place, 300, 300, (2, 1))
    grad = torch.randn_like(leaves[0])

    def gradients() -> list[torch.Tensor]:
        out = flashinfer.single_prefill_with_kv_cache(*leaves, causal=True)
        return list(torch.autograd.grad(out, leaves, grad))

    wanted = gradients()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(gradients).result()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
