"""Latent attention with sinks, without rotary keys and with scales per token, against float64."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch

import flashinfer
from flashinfer._mla.operators import operators_for, run_for_scales
from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.jit.modules import Matrix, matrix_specs
from flashinfer.jit.modules.mla import mla_spec

from ..support.attention_oracle import workspace
from ..support.mla_samples import Batch, drawn_batch, sentinels
from ..support.plans import num_merges
from .test_mla import backends, dtype_of

FP8 = torch.float8_e4m3fn


def check_forms(batch: Batch, **options: object) -> None:
    """Check a batch on all backends: outputs and lse that are written, and both bases."""
    given = batch.scale_arguments | options
    for backend in backends(batch.device):
        if backend == "fa3" and batch.kv_dtype == FP8 and batch.dtype != torch.bfloat16:
            continue
        wrapper = batch.planned(backend)
        out, lse = sentinels(batch)
        assert wrapper.run(*batch.inputs, out=out, lse=lse, sinks=batch.sinks, **given) is out
        batch.check(out, lse)
        again, natural = wrapper.run(
            *batch.inputs, return_lse=True, return_lse_base_on_e=True, sinks=batch.sinks, **given
        )
        assert torch.equal(again, out)
        torch.testing.assert_close(natural, lse * math.log(2))


@pytest.mark.parametrize("cache", ["same", "fp8"])
def test_sinks(cache, dtype, device):
    for number in range(4 if device == "cpu" else 20):
        kv_dtype = FP8 if cache == "fp8" else None
        batch = drawn_batch(dtype_of(dtype, device), device, 150 if number else 1500, kv_dtype)
        batch.draw_sinks()
        check_forms(batch)


def test_sinks_of_split_requests(device):
    batch = Batch([1, 3], [3000, 40], 32, 64, torch.bfloat16, device, causal=True)
    batch.draw_sinks()
    for backend in backends(device):
        assert num_merges(batch.planned(backend)) > 0
    check_forms(batch)


def test_sinks_of_queries_without_keys(device):
    """A query without keys has output 0, and the sink as its lse."""
    batch = Batch([5, 2], [3, 0], 16, 16, torch.float16, device, causal=True)
    batch.draw_sinks()
    assert batch.sinks is not None
    check_forms(batch)
    for backend in backends(device):
        out, lse = batch.planned(backend).run(*batch.inputs, return_lse=True, sinks=batch.sinks)
        assert out[:2].count_nonzero() == 0 and out[5:].count_nonzero() == 0
        torch.testing.assert_close(lse[5:], (batch.sinks / math.log(2)).expand(2, -1))


@pytest.mark.parametrize("cache", ["same", "fp8"])
def test_no_rotary_keys(cache, dtype, device):
    for number in range(4 if device == "cpu" else 20):
        kv_dtype = FP8 if cache == "fp8" else None
        batch = drawn_batch(dtype_of(dtype, device), device, 150 if number else 1500, kv_dtype, head_dim_kpe=0)
        assert batch.q_pe.shape[-1] == batch.kpe.shape[-1] == 0
        if random.random() < 0.5:
            batch.draw_sinks()
        check_forms(batch)


@pytest.mark.parametrize("head_dim_kpe", [64, 0])
def test_scales_of_tokens_and_groups(head_dim_kpe, device):
    for number in range(6 if device == "cpu" else 20):
        batch = drawn_batch(torch.bfloat16, device, 150 if number else 1500, FP8, head_dim_kpe)
        batch.draw_scales()
        if random.random() < 0.5:
            batch.draw_sinks()
        check_forms(batch)


def test_scales_of_split_requests(device):
    batch = Batch([1, 5], [3000, 30], 32, 64, torch.bfloat16, device, causal=True, kv_dtype=FP8)
    batch.draw_scales()
    check_forms(batch)


def test_joined_inputs(device):
    batch = Batch([2, 1], [100, 70], 16, 16, torch.bfloat16, device)
    q_nope, q_pe, ckv, kpe = batch.inputs
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, query_layout="packed", kv_cache_layout="split", lse_mode="base2", scale_mode="default")
    want = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
    batch.check(*want)
    for query, kv_cache in (
        ((q_nope, q_pe), (ckv, kpe)),
        (torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)),
        ([q_nope, q_pe], torch.cat([ckv, kpe], -1)),
    ):
        got = wrapper.run(query=query, kv_cache=kv_cache, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("form", ["sinks", "scales", "no rotary keys"])
def test_forms_compiled_in_one_graph(form, device, cold_dynamo):
    def made(first: int) -> Batch:
        scaled = form == "scales"
        batch = Batch(
            [first, 2], [50 * first, 30], 16, 16, torch.bfloat16, device, kv_dtype=FP8 if scaled else None,
            head_dim_kpe=0 if form == "no rotary keys" else 64,
        )  # fmt: skip
        if scaled:
            batch.draw_scales()
        if form == "sinks":
            batch.draw_sinks()
        return batch

    batch = made(1)
    wrapper = batch.planned()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(*inputs: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        out, lse = wrapper.run(*inputs, return_lse=True, **options)
        return out * 2 + lse[..., None] * 0

    for first in (1, 1, 3):
        batch = made(first)
        batch.plan(wrapper)
        options = {name: x for name, x in batch.scale_arguments.items() if name != "kpe_scale"}
        options |= {"sinks": batch.sinks} if batch.sinks is not None else {}
        if options.get("ckv_scale_arr") is not None:
            options["kpe_scale"] = batch.kpe_scale = 0.75
        out = program(*batch.inputs, **options) / 2
        batch.check(out.to(batch.dtype))


def test_the_run_of_the_next_plan_reads_the_same_zeros(device):
    """A captured graph reads the zeros of a plan after later plans."""
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device, head_dim_kpe=0)
    wrapper = batch.planned()
    zeros = wrapper._planned.no_rope
    batch.plan(wrapper)
    assert wrapper._planned.no_rope is zeros and zeros.count_nonzero() == 0


def test_signature():
    """ENGINES: vLLM takes a keyword-only ``ckv_scale_arr`` for plans that it may write into."""
    run = inspect.signature(flashinfer.BatchMLAPagedAttentionWrapper.run).parameters
    assert run["ckv_scale_arr"].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in ("query", "kv_cache", "ckv_scale", "kpe_scale", "sinks", "bmm1_scale", "bmm2_scale"):
        assert run[name].kind == inspect.Parameter.KEYWORD_ONLY
    plan = list(inspect.signature(flashinfer.BatchMLAPagedAttentionWrapper.plan).parameters.values())[1:]
    assert [one.kind for one in plan[:12]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(lse_mode="base10"), ValueError, r"plan: lse_mode: got 'base10', wanted None, 'none', 'base2' or"),
        (dict(scale_mode="bmm-scalar"), ValueError, r"plan: scale_mode: got 'bmm-scalar', wanted"),
        (dict(use_sinks=2), ValueError, r"plan: use_sinks: got 2, wanted None, False or True"),
        (dict(query_layout="joined"), ValueError, r"plan: query_layout: got 'joined', wanted"),
        (dict(kv_cache_layout="joined"), ValueError, r"plan: kv_cache_layout: got 'joined', wanted"),
        (dict(output_dtype=torch.float32), UnsupportedError, r"plan: output_dtype: got torch.float32, wanted torch.bf"),
        (dict(output_dtype="float61"), ValueError, r"plan: output_dtype: got 'float61'"),
        (dict(block_tables=torch.zeros(1)), UnsupportedError, r"plan: block_tables: got Tensor, wanted None: pass qo"),
        (dict(metadata=1), UnsupportedError, r"plan: metadata: got int, wanted None"),
        (dict(cum_seq_lens_q=1), UnsupportedError, r"plan: cum_seq_lens_q: got int, wanted None"),
        (dict(seq_lens=1), UnsupportedError, r"plan: seq_lens: got int, wanted None"),
        (dict(max_q_len=1), UnsupportedError, r"plan: max_q_len: got int, wanted None"),
    ],
    ids=str,
)
def test_bad_options_of_plans(options, error, message, device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device)
    wrapper = batch.planned()
    before = wrapper.run(*batch.inputs)
    with pytest.raises(error, match=message):
        batch.plan(wrapper, **options)
    assert torch.equal(wrapper.run(*batch.inputs), before)


def test_runs_that_differ_from_their_plans(device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device)
    batch.draw_sinks()
    wrapper = batch.planned()
    natural = dict(return_lse=True, return_lse_base_on_e=True)
    for options, run, message in (
        (dict(lse_mode="none"), dict(return_lse=True), r"lse_mode: got base2, and plan\(\) was called for none"),
        (dict(lse_mode="base2"), dict(), r"lse_mode: got none, and plan\(\) was called for base2"),
        (dict(lse_mode="base2"), natural, r"lse_mode: got basee, and plan\(\) was called for base2"),
        (dict(lse_mode="basee"), dict(return_lse=True), r"lse_mode: got base2, and plan\(\) was called for basee"),
        (dict(use_sinks=True), dict(), r"sinks: got False, and plan\(\) was called for True"),
        (dict(use_sinks=False), dict(sinks=batch.sinks), r"sinks: got True, and plan\(\) was called for False"),
    ):
        batch.plan(wrapper, **options)
        out, _ = sentinels(batch)
        with pytest.raises(ValueError, match=message):
            wrapper.run(*batch.inputs, out=out, **run)
        assert bool(out.isnan().all())
    batch.plan(wrapper, lse_mode="basee", use_sinks=True, output_dtype="bfloat16")
    out, lse = wrapper.run(*batch.inputs, sinks=batch.sinks, **natural)
    batch.check(out, lse / math.log(2))


def test_bad_runs_of_forms(device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device)
    wrapper = batch.planned()
    q_nope, q_pe, ckv, kpe = batch.inputs
    sinks = torch.zeros(16, device=device)
    for arguments, options, error, message in (
        ((), dict(), ValueError, r"run: q_nope: got None, wanted a tensor"),
        ((q_nope,), dict(), ValueError, r"run: q_pe: got None, wanted a tensor"),
        ((q_nope, q_pe), dict(), ValueError, r"run: ckv_cache: got None, wanted a tensor"),
        ((q_nope, q_pe, ckv), dict(), ValueError, r"run: kpe_cache: got None, wanted a tensor"),
        ((q_nope,), dict(query=q_nope, kv_cache=ckv), ValueError, r"run: q_nope: got Tensor, wanted None: query has it"),
        ((), dict(query=(q_nope,), kv_cache=ckv), ValueError, r"run: query: got 1, wanted 2, its two parts"),
        ((), dict(query=5, kv_cache=ckv), TypeError, r"run: query: got int, wanted a list or tuple of its two parts"),
        ((), dict(query=q_nope, kv_cache=(ckv, kpe)), ValueError, r"q_pe: got shape \[1, 16, 0\], wanted \[1, 16, 64\]"),
        ((), dict(query=(q_nope, q_pe), kv_cache=ckv[0]), ValueError, r"kv_cache: got 2 dimensions, wanted 3"),
        (batch.inputs, dict(sinks=sinks[:8]), ValueError, r"sinks: got shape \[8\], wanted \[16\]"),
        (batch.inputs, dict(sinks=sinks.half()), TypeError, r"sinks: got torch.float16, wanted torch.float32"),
        (batch.inputs, dict(sinks=torch.zeros(32, device=device)[::2]), ValueError, r"sinks: got shape .* contiguous"),
        (batch.inputs, dict(sinks=sinks.clone().requires_grad_()), GradientError, r"run: has no gradient"),
        (batch.inputs, dict(o_scale=1.0), UnsupportedError, r"run: o_scale: got float, wanted None"),
        (batch.inputs, dict(bmm1_scale=1.0), UnsupportedError, r"run: bmm1_scale: got float, wanted None"),
        (batch.inputs, dict(bmm2_scale=1.0), UnsupportedError, r"run: bmm2_scale: got float, wanted None"),
        (
            batch.inputs, dict(skip_softmax_threshold_scale_factor=1.0), UnsupportedError,
            r"run: skip_softmax_threshold_scale_factor: got float, wanted None",
        ),
    ):  # fmt: skip
        out, lse = sentinels(batch)
        with pytest.raises(error, match=message):
            wrapper.run(*arguments, out=out, lse=lse, **options)
        assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_bad_inputs_without_rotary_keys(device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device, head_dim_kpe=0)
    wrapper = batch.planned()
    q_nope, q_pe, ckv, kpe = batch.inputs
    rotary = Batch([1], [40], 16, 16, torch.bfloat16, device)
    for inputs, error, message in (
        ((q_nope, rotary.q_pe, ckv, kpe), ValueError, r"q_pe: got shape \[1, 16, 64\], wanted \[1, 16, 0\]"),
        ((q_nope, q_pe, ckv, rotary.kpe), ValueError, r"kpe_cache: got shape \[\d+, 16, 64\], wanted \[\d+, 16, 0\]"),
        ((q_nope, q_pe, ckv, kpe[:1]), ValueError, r"kpe_cache: got shape \[1, 16, 0\], wanted"),
        ((q_nope, q_pe.float(), ckv, kpe), ValueError, r"q_pe.dtype: got torch.float32"),
    ):
        out, lse = sentinels(batch)
        with pytest.raises(error, match=message):
            wrapper.run(*inputs, out=out, lse=lse)
        assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_bad_scales_of_tokens(device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device, kv_dtype=FP8)
    batch.draw_scales()
    arr = batch.scales
    assert arr is not None
    half = Batch([1], [40], 16, 16, torch.float16, device, kv_dtype=FP8)
    same = Batch([1], [40], 16, 16, torch.bfloat16, device)
    for given, options, error, message in (
        (batch, dict(ckv_scale_arr=arr), ValueError, r"run: kpe_scale: got None, wanted all or none of ckv_scale_arr"),
        (batch, dict(kpe_scale=1.0), ValueError, r"ckv_scale: got None, .* Exactly one of ckv_scale or ckv_scale_arr"),
        (
            batch, dict(ckv_scale_arr=arr, ckv_scale=1.0, kpe_scale=1.0), ValueError,
            r"ckv_scale: got both, wanted one scale. Exactly one of ckv_scale or ckv_scale_arr",
        ),
        (batch, dict(ckv_scale_arr=arr, kv_scale=1.0), ValueError, r"kv_scale: got both, wanted only kv_scale or only ckv_scale_arr"),
        (batch, dict(kpe_scale=1.0, kv_scale=1.0), ValueError, r"kv_scale: got both, wanted only kv_scale or only ckv_scale and kpe"),
        (
            batch, dict(ckv_scale_arr=arr[..., :3], kpe_scale=1.0), ValueError,
            r"ckv_scale_arr: got shape \[\d+, 16, 3\], wanted \[\d+, 16, 4\]. Invalid shape of ckv_scale_arr",
        ),
        (batch, dict(ckv_scale_arr=arr[:1], kpe_scale=1.0), ValueError, r"ckv_scale_arr: got shape \[1, 16, 4\]"),
        (batch, dict(ckv_scale_arr=arr.double(), kpe_scale=1.0), TypeError, r"ckv_scale_arr: got float64, wanted float"),
        (
            batch, dict(ckv_scale_arr=arr.transpose(-1, -2).contiguous().transpose(-1, -2), kpe_scale=1.0), ValueError,
            r"ckv_scale_arr: got stride 16 of the last dimension, wanted 1",
        ),
        (batch, dict(ckv_scale_arr=2.0, kpe_scale=1.0), TypeError, r"ckv_scale_arr: got float, wanted Tensor"),
        (batch, dict(ckv_scale_arr=arr, kpe_scale=0.0), ValueError, r"kpe_scale: got 0.0, wanted a positive"),
        (
            batch, dict(ckv_scale_arr=arr.clone().requires_grad_(), kpe_scale=1.0), GradientError,
            r"run: has no gradient",
        ),
        (half, dict(ckv_scale_arr=arr, kpe_scale=1.0), ValueError, r"ckv_scale_arr: .* wanted q_data_type=torch.bfloat"),
        (same, dict(ckv_scale_arr=arr), ValueError, r"ckv_scale_arr: got Tensor, wanted None: the cache is not 8-bit"),
        (same, dict(kpe_scale=1.0), ValueError, r"kpe_scale: got float, wanted None: the cache is not 8-bit"),
    ):  # fmt: skip
        out, lse = sentinels(given)
        with pytest.raises(error, match=message):
            given.planned().run(*given.inputs, out=out, lse=lse, **options)
        assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_modules_with_scales_of_tokens():
    """They are built on first use: the matrix has none of them."""
    spec = mla_spec("cuda", scaled=True)
    assert spec.name == "mla_scaled_cuda" and spec.namespace == "flashinfer_scaled"
    assert dict(spec.coverage) == {"dtypes": ("bfloat16:float8_e4m3fn",)}
    assert not [spec for spec in matrix_specs(Matrix(), ["mla"]) if "scaled" in spec.name]


def test_runs_for_scales_of_tokens():
    """CUDA has an operator of its own, and none that writes events. The CPU's operators all multiply by scales."""
    plain, profiled = (operators_for("f", torch.device("cpu"), "auto", profiler) for profiler in (False, True))
    gpu = torch.device("cuda")
    for operators in (plain, profiled):
        assert run_for_scales("f", torch.device("cpu"), operators) is operators.run
    assert run_for_scales("f", gpu, plain) is not plain.run
    with pytest.raises(UnsupportedError, match="ckv_scale_arr: got a tensor, and no kernels for it write events"):
        run_for_scales("f", gpu, profiled)
