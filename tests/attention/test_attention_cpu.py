"""Properties of the CPU kernels: dynamic scheduling, float8 in registers, checks of tables during a run."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer
from flashinfer._attention.signature import CallArguments, Parameters, PlanNumbers
from flashinfer.jit.modules.decode import gen_single_decode_module
from tests.support.attention_oracle import workspace


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_every_float8_is_read_as_torch_reads_it(kv_dtype):
    """Use one key per head: its weight is 1, and the output is its value, also for infinities and NaN."""
    v = torch.arange(256, dtype=torch.uint8).view(kv_dtype)[torch.randperm(256)].view(1, 4, 64)
    k = torch.zeros(1, 4, 64, dtype=torch.uint8).view(kv_dtype)
    q = torch.randn(8, 64).half()  # float16 represents every number of both types
    out = flashinfer.single_decode_with_kv_cache(q, k, v).float()
    want = v.float().view(4, 64).repeat_interleave(2, 0)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(1e9), want.nan_to_num(1e9))


def test_bits_do_not_depend_on_the_threads(threads):
    lengths = [random.choice([1, 300, 700, 1500, 4000]) for _ in range(3)]
    pages = [-(-length // 16) for length in lengths]
    cache = torch.randn(sum(pages), 2, 16, 2, 64)
    q = torch.randn(3, 8, 64)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(
        torch.tensor([0, *pages]).cumsum(0).int(),
        torch.randperm(sum(pages)).int(),
        torch.tensor([(length - 1) % 16 + 1 for length in lengths], dtype=torch.int32),
        8, 2, 64, 16, q_data_type=torch.float32,
    )  # fmt: skip
    out, lse = wrapper.run(q, cache, return_lse=True)
    for count in (1, 2, 3, 1):
        threads(count)
        again, again_lse = wrapper.run(q, cache, return_lse=True)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_a_page_outside_of_the_cache_is_never_read():
    """Check tables during a run: wrappers check theirs in plan(), but other callers may run a module."""
    module = gen_single_decode_module("float32", "float32", "float32", 64, 64, device="cpu").build_and_load()
    cache, q, out = torch.randn(5, 2, 16, 2, 64), torch.randn(1, 8, 64), torch.full((1, 8, 64), 7.0)
    indptr, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([19], dtype=torch.int32)
    plan = torch.zeros(256, dtype=torch.int32)
    plan = plan[-plan.data_ptr() // 4 % 8 :]  # lists are aligned to 32 bytes
    module.plan(plan, PlanNumbers(8, 2, 64, 64, 1, 1, 1, 0, -1, -1, split=0).tensor(), None, lengths, None, None, None)
    items, merges, tile_rows, slot_rows, slots = plan[:5].tolist()

    def run(page: int) -> None:
        arguments = CallArguments(
            indptr,
            torch.tensor([0, page], dtype=torch.int32),
            plan,
            None,
            1,
            items,
            merges,
            slots,
            tile_rows,
            slot_rows,
        )
        module.run(q, cache[:, 0], cache[:, 1], out, None, *arguments, *Parameters(sm_scale=0.125))

    for wrong in (5, -1, 2**30):
        with pytest.raises(RuntimeError, match=f"kv_indices: got page {wrong} for request 0, wanted one below .* 5"):
            run(wrong)
        assert bool((out == 7).all()), "something was written before the error"
    run(4)
    keys, values = (torch.cat((cache[0, i], cache[4, i, :3])) for i in range(2))
    torch.testing.assert_close(out[0], flashinfer.single_decode_with_kv_cache(q[0], keys, values, sm_scale=0.125))


@pytest.mark.parametrize("scale", [1.0, 40.0, 1e4])
def test_weights_far_below_the_highest_are_zero(scale):
    """Use logits that differ by hundreds: no denormals, no overflow, and only the highest keys count."""
    q, k, v = torch.randn(3, 2, 64), torch.randn(500, 2, 64), torch.randn(500, 2, 64)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, sm_scale=scale, return_lse=True)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    # Logits are float32 sums of 64 products. Their error carries over to the weights.
    error = 64 * 2.0**-24 * 20 * scale
    highest = logits.max(-1).values.T / math.log(2)
    assert bool((lse >= highest - 1.5 * error - 1e-3).all()) and bool(out.isfinite().all())
    if error < 0.01:
        expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.double())
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * error)
