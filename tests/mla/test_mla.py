"""Multi-head latent attention against float64, and errors of its wrappers."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..conftest import no_synchronisation
from ..support.attention_oracle import int32, workspace
from ..support.mla_samples import SCALE, Batch, drawn_batch, sentinels
from ..support.plans import num_merges

HALF = [torch.float16, torch.bfloat16]


def backends(device: str) -> list[str]:
    """Return the backends of the device."""
    if device == "cpu":
        return ["auto"]
    return ["fa2", "fa3"] if torch.cuda.get_device_capability() == (9, 0) else ["fa2"]


def dtype_of(dtype: torch.dtype, device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" and dtype == torch.float32 else dtype


@pytest.mark.parametrize("part", range(4))
def test_drawn_batches(part, dtype, device):
    for _ in range(4 if device == "cpu" else 20):
        batch = drawn_batch(dtype_of(dtype, device), device, 150 if device == "cpu" else 700)
        for backend in backends(device):
            wrapper = batch.planned(backend)
            out, lse = sentinels(batch)
            assert wrapper.run(*batch.inputs, out=out, lse=lse) is out
            batch.check(out, lse)


def test_a_cache_of_eight_bits(dtype, device):
    """A cache of 8 bits has exact elements here, and a scale of keys and outputs."""
    for number in range(4 if device == "cpu" else 20):
        batch = drawn_batch(dtype_of(dtype, device), device, 150 if number else 3000, torch.float8_e4m3fn)
        out, lse = sentinels(batch)
        assert batch.planned().run(*batch.inputs, out=out, lse=lse, kv_scale=batch.kv_scale) is out
        batch.check(out, lse)


def test_a_cache_of_eight_bits_with_two_scales(device):
    """Latents and rotary keys have scales of their own. Backend fa3 serves bfloat16 queries."""
    for number in range(4 if device == "cpu" else 20):
        batch = drawn_batch(torch.bfloat16, device, 150 if number else 3000, torch.float8_e4m3fn)
        batch.kpe_scale = batch.kv_scale * random.choice((0.1, 0.5, 3.0))
        scales = dict(ckv_scale=batch.kv_scale, kpe_scale=batch.kpe_scale)
        for backend in backends(device):
            out, lse = sentinels(batch)
            wrapper = batch.planned(backend)
            assert wrapper.run(*batch.inputs, out=out, lse=lse, **scales) is out
            batch.check(out, lse)
            again, natural = wrapper.run(*batch.inputs, return_lse=True, return_lse_base_on_e=True, **scales)
            assert torch.equal(again, out)
            torch.testing.assert_close(natural, lse * math.log(2))
            written = torch.full_like(lse, 7.0)
            wrapper.run(*batch.inputs, lse=written, return_lse_base_on_e=True, **scales)
            assert torch.equal(written, natural)


def test_bad_scales(device):
    batch = Batch([1], [40], 16, 16, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    whole = Batch([1], [40], 16, 16, torch.bfloat16, device)
    for error, message, planned, scales in (
        (ValueError, "ckv_scale: got None, wanted one scale. Exactly one of ckv_scale or ckv_scale_arr", batch, {}),
        (ValueError, "kpe_scale: got None, wanted all or none of", batch, dict(ckv_scale=1.0)),
        (ValueError, "kv_scale: got both", batch, dict(ckv_scale=1.0, kpe_scale=1.0, kv_scale=1.0)),
        (ValueError, "ckv_scale: got 0.0, wanted a positive", batch, dict(ckv_scale=0.0, kpe_scale=1.0)),
        (ValueError, "kpe_scale: got -1.0, wanted a positive", batch, dict(ckv_scale=1.0, kpe_scale=-1.0)),
        (ValueError, "ckv_scale: got float, wanted None: the cache", whole, dict(ckv_scale=1.0, kpe_scale=1.0)),
    ):
        out, lse = sentinels(planned)
        with pytest.raises(error, match=message):
            planned.planned().run(*planned.inputs, out=out, lse=lse, **scales)
        assert bool(out.isnan().all())
    run = inspect.signature(flashinfer.BatchMLAPagedAttentionWrapper.run).parameters
    assert run["ckv_scale"].kind == run["kpe_scale"].kind == inspect.Parameter.KEYWORD_ONLY


def test_bad_caches_of_eight_bits(device):
    batch = Batch([1], [40], 16, 16, torch.float16, device, kv_dtype=torch.float8_e4m3fn)
    wrapper = batch.planned()
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"run: kv_scale: got {scale}, wanted a positive number"):
            wrapper.run(*batch.inputs, kv_scale=scale)
    wanted = r"ckv_cache.dtype: got torch.float16, wanted torch.float8_e4m3fn, for which plan\(\) was called"
    with pytest.raises(ValueError, match=wanted):
        wrapper.run(*batch.inputs[:2], batch.ckv.half(), batch.kpe.half(), kv_scale=1.0)
    q_nope, q_pe, ckv, kpe = batch.inputs
    with pytest.raises(ValueError, match=r"kpe_cache.dtype: got torch.float16, wanted torch.float8"):
        wrapper.run(q_nope, q_pe, ckv, kpe.half(), kv_scale=1.0)
    if "fa3" in backends(device):
        with pytest.raises(ValueError, match=r"wanted q_data_type=torch.bfloat16 for a cache of 8 bits"):
            batch.planned("fa3")


@pytest.mark.parametrize("causal", [False, True])
def test_long_requests_are_split_and_merged(causal, device):
    batch = Batch([1, 5], [3000, 30], 32, 64, torch.bfloat16, device, causal=causal)
    for backend in backends(device):
        wrapper = batch.planned(backend)
        assert num_merges(wrapper) > 0
        batch.check(*wrapper.run(*batch.inputs, return_lse=True))


def test_more_queries_than_keys(device):
    """With a causal mask the first queries see no key: output 0 and lse -inf."""
    batch = Batch([9, 3], [4, 0], 16, 16, torch.float16, device, causal=True)
    for backend in backends(device):
        out, lse = batch.planned(backend).run(*batch.inputs, return_lse=True)
        batch.check(out, lse)
        assert out[:5].count_nonzero() == 0 and bool((lse[:5] == -torch.inf).all())


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_the_same_bits_in_every_run(page_size, device):
    batch = Batch([1, 2, 1], [1500, 400, 65], 32, page_size, torch.bfloat16, device)
    for backend in backends(device):
        wrapper = batch.planned(backend)
        first = wrapper.run(*batch.inputs, return_lse=True)
        for _ in range(3):
            batch.plan(wrapper)
            again = wrapper.run_return_lse(*batch.inputs)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_large_logits(device):
    """The running maximum m rises often and by large steps."""
    batch = Batch([1], [700], 16, 64, torch.bfloat16, device)
    batch.q_nope.mul_(30)
    for backend in backends(device):
        batch.check(*batch.planned(backend).run(*batch.inputs, return_lse=True))


@pytest.mark.parametrize("kind", ["q_nope", "out"])
def test_strided(kind, device):
    batch = Batch([2, 1], [100, 70], 16, 16, torch.float16, device)
    padded = torch.full((3, 16, 1024), torch.nan, dtype=torch.float16, device=device)
    view = padded[:, :, 256:768]
    for backend in backends(device):
        wrapper, out = batch.planned(backend), None
        if kind == "out":
            out = view
        else:
            batch.q_nope = view.copy_(batch.q_nope)
        batch.check(wrapper.run(*batch.inputs, out=out))
        assert bool(padded[:, :, :256].isnan().all()) and bool(padded[:, :, 768:].isnan().all())


def test_lengths_shorter_than_pages(device):
    """Engines plan more pages than keys, with int64 tables."""
    batch = Batch([1, 1], [130, 64], 16, 16, torch.float16, device)
    qo_indptr, kv_indptr, kv_indices, _ = batch.tables
    batch.paged.kv_lens = [100, 33]
    for backend in backends(device):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
        batch.plan(
            wrapper, qo_indptr=qo_indptr.long(), kv_indptr=kv_indptr.long(), kv_indices=kv_indices.long(),
            kv_len_arr=int32([100, 33]).to(device),
        )  # fmt: skip
        batch.check(wrapper.run(*batch.inputs))


def test_entries_after_the_last_request_are_not_read(device):
    batch = Batch([1, 1], [100, 33], 16, 16, torch.float16, device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, kv_indptr=torch.cat([batch.tables[1], int32([99, 7]).to(device)]))
    batch.check(wrapper.run(*batch.inputs))


def test_page_table(device):
    """A call without a plan passes a row of pages per request."""
    batch = Batch([1, 1], [128, 50], 128, 64, torch.bfloat16, device)
    _, _, indices, lens = batch.tables
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    table[0], table[1, 0] = indices[:2], indices[2]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), backend="cutlass")
    batch.check(wrapper.run(*batch.inputs, kv_len=lens, page_table=table))


def test_empty(device):
    batch = Batch([], [], 16, 16, torch.float16, device)
    out, lse = batch.planned().run(*batch.inputs, return_lse=True)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_a_cache_without_pages(page_size, device):
    """No request has a key, and the cache has no page."""
    batch = Batch([1, 3], [0, 0], 16, page_size, torch.float16, device)
    cache = [torch.empty(0, page_size, dim, dtype=torch.float16, device=device) for dim in (512, 64)]
    for backend in backends(device):
        out, lse = sentinels(batch)
        batch.planned(backend).run(*batch.inputs[:2], *cache, out=out, lse=lse)
        assert out.count_nonzero() == 0 and bool((lse == -torch.inf).all())


def test_run_does_not_wait(device):
    batch = Batch([1, 3], [700, 50], 16, 64, torch.bfloat16, device)
    for backend in backends(device):
        wrapper = batch.planned(backend)
        wrapper.run(*batch.inputs)
        with no_synchronisation(device):
            wrapper.run(*batch.inputs, return_lse=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("page_size", [1, 64])
def test_one_graph_serves_many_plans(page_size):
    device, most, heads = "cuda", 4, 8
    for backend in backends(device):
        tables = [torch.zeros(n, dtype=torch.int32, device=device) for n in (most + 1, most + 1, 1 << 16, most)]
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), True, *tables, backend=backend)
        first = Batch([1] * most, [0] * most, heads, page_size, torch.bfloat16, device)
        first.plan(wrapper)
        cache = torch.full(((1 << 16) // page_size * page_size * 576,), torch.nan, dtype=torch.bfloat16, device=device)
        cache = cache.view(-1, page_size, 576)
        inputs = (*(x.clone() for x in first.inputs[:2]), cache[..., :512], cache[..., 512:])
        out, lse = sentinels(first)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            wrapper.run(*inputs, out=out, lse=lse)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(*inputs, out=out, lse=lse)
        for number in range(50):
            lens = [int(n) for n in torch.randint(0, 4000 if number % 10 == 0 else 300, (most,))]
            batch = Batch([1] * most, lens, heads, page_size, torch.bfloat16, device)
            batch.plan(wrapper)
            for to, x in zip(inputs[:2], batch.inputs[:2], strict=True):
                to.copy_(x)
            inputs[2][: len(batch.ckv)], inputs[3][: len(batch.kpe)] = batch.ckv, batch.kpe
            graph.replay()
            batch.check(out, lse)


def test_compiled_in_one_graph(device, cold_dynamo):
    batch = Batch([1, 2], [100, 30], 16, 16, torch.bfloat16, device)
    wrapper = batch.planned()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(*inputs: torch.Tensor) -> torch.Tensor:
        out, lse = wrapper.run(*inputs, return_lse=True)
        return out * 2 + lse[..., None] * 0

    for lens in ([1, 2], [1, 2], [3, 1], [2, 7]):
        batch = Batch(lens, [100 + 50 * lens[0], 30 + lens[1]], 16, 16, torch.bfloat16, device)
        batch.plan(wrapper)
        batch.check((program(*batch.inputs) / 2).to(batch.dtype))


def test_decode_wrapper(device):
    batch = Batch([1, 1, 1], [100, 0, 33], 16, 16, torch.float16, device)
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
    tables = batch.paged.tables_on(device)
    wrapper.plan(*tables, 16, 512, 16, SCALE, data_type=batch.dtype, rope_theta=1e4)
    batch.check(*wrapper.run(*batch.inputs, return_lse=True))
    batch.check(*wrapper.run_return_lse(*batch.inputs))
    batch.check(wrapper.run(*batch.inputs, v_scale=2.0) / 2)
    wrapper.plan(*tables, 16, 512, 16, SCALE / 4, data_type=batch.dtype)
    batch.check(wrapper.run(*batch.inputs, q_scale=2.0, k_scale=2.0))
    with pytest.raises(ValueError, match=r"window_left: got 5, wanted at most -1: a query"):
        wrapper.plan(*tables, 16, 512, 16, SCALE, window_left=5)
    with pytest.raises(TypeError, match=r"window_left: got 5.5, wanted an integer"):
        wrapper.plan(*tables, 16, 512, 16, SCALE, window_left=5.5)
    with pytest.raises(ValueError, match=r"plan: head_dim_compressed_kv: got 256, wanted 512"):
        wrapper.plan(*tables, 16, 256, 16, SCALE)
    with pytest.raises(TypeError, match=r"plan: indptr: got NoneType, wanted Tensor"):
        wrapper.plan(None, *tables[1:], 16, 512, 16, SCALE)
    with pytest.raises(ValueError, match=r"logits_soft_cap: got 30.0, wanted None or 0"):
        wrapper.plan(*tables, 16, 512, 16, SCALE, logits_soft_cap=30.0)
    with pytest.raises(ValueError, match=r"last_page_len\[2\]: got \d+, wanted 0 to 16"):
        wrapper.plan(tables[0], tables[1], int32([4, 0, 68]).to(device), 16, 512, 16, SCALE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_heads=0), r"num_heads: got 0, wanted a positive number"),
        (dict(num_heads="a"), r"num_heads: got str, wanted an integer"),
        (dict(page_size=5.5), r"page_size: got 5.5, wanted an integer"),
        (dict(qo_indptr=None), r"plan: qo_indptr: got NoneType, wanted Tensor"),
        (dict(kv_indptr=None), r"plan: kv_indptr: got NoneType, wanted Tensor"),
        (dict(kv_len_arr=torch.zeros(2)), r"kv_len_arr: got torch.float32, wanted torch.int32 or other integers"),
        (dict(sm_scale=None), r"plan: sm_scale: got NoneType, wanted a number"),
        (dict(q_data_type="float61"), r"plan: q_data_type: got 'float61', wanted the name of a torch dtype"),
        (dict(kv_data_type=8), r"plan: kv_data_type: got int, wanted a torch.dtype or its name"),
        (dict(page_size=0), r"page_size: got 0, wanted a positive number"),
        (dict(head_dim_ckv=256), r"plan: head_dim_ckv: got 256, wanted 512"),
        (dict(head_dim_kpe=32), r"head_dim_kpe: got 32, wanted 64 or 0"),
        (dict(sm_scale=0.0), r"sm_scale: got 0.0, wanted a positive number"),
        (dict(q_data_type=torch.float64), r"q_data_type: got torch.float64, wanted (torch.float32, )?torch.float16 or"),
        (dict(kv_data_type=torch.float8_e5m2), r"kv_data_type: got torch.float8_e5m2, wanted torch.float16"),
        (dict(kv_len_arr=[100, 33, 1]), r"kv_indptr: got 3 elements, wanted 4, one more than kv_len_arr has"),
        (dict(kv_len_arr=[100, 49]), r"kv_len_arr\[1\]: got 49, wanted 0 to 48, the slots"),
        (dict(kv_len_arr=[100, -1]), r"kv_len_arr\[1\]: got -1"),
        (dict(qo_indptr=[0, 2, 1]), r"qo_indptr: got 1 at 2 after 2, wanted numbers that never decrease"),
        (dict(qo_indptr=[0, 2]), r"qo_indptr: got 2 elements, wanted 3"),
        (dict(kv_indptr=[-1, 2, 3]), r"kv_indptr: got -1 first, wanted 0 or more"),
        (dict(kv_indices=[0, 1]), r"kv_indices: got 2 pages, wanted at least 10, the end of kv_indptr"),
    ],
    ids=str,
)
def test_bad_plans(change, message, device):
    batch = Batch([1, 1], [100, 33], 16, 16, torch.float16, device)
    wrapper = batch.planned()
    before = wrapper.run(*batch.inputs)
    change = {name: int32(x).to(device) if isinstance(x, list) else x for name, x in change.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        batch.plan(wrapper, **change)
    assert torch.equal(wrapper.run(*batch.inputs), before)


def test_bad_runs(device):
    batch = Batch([1, 1], [100, 33], 16, 16, torch.float16, device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    with pytest.raises(RuntimeError, match=r"got a call before plan\(\)"):
        wrapper.run(*batch.inputs)
    batch.plan(wrapper)
    q_nope, q_pe, ckv, kpe = batch.inputs
    out, lse = sentinels(batch)
    for arguments, error, message in (
        ((q_nope[:1], q_pe[:1], ckv, kpe), ValueError, r"q_nope: got 1 queries, and plan\(\) was called for 2"),
        ((q_nope[:, :8], q_pe[:, :8], ckv, kpe), ValueError, r"q_nope: got 8 heads"),
        ((q_nope.bfloat16(), q_pe, ckv, kpe), ValueError, r"q_nope.dtype: got torch.bfloat16"),
        ((q_nope, q_pe[..., :32], ckv, kpe), ValueError, r"q_pe: got shape \[2, 16, 32\]"),
        ((q_nope, q_pe, ckv[:, :8], kpe), ValueError, r"ckv_cache: got 8 slots in a page"),
        ((q_nope, q_pe, ckv, kpe[:-1]), ValueError, r"kpe_cache: got shape"),
        ((q_nope, q_pe, ckv, kpe, out[:1]), ValueError, r"out: got shape \[1, 16, 512\]"),
        ((q_nope, q_pe, ckv, kpe, q_nope), ValueError, r"out: overlaps the memory of q_nope"),
        ((q_nope, q_pe, ckv, kpe, out, lse.double()), TypeError, r"lse: got float64"),
        ((q_nope, q_pe, ckv, kpe, out, lse[:1]), ValueError, r"lse: got shape \[1, 16\]"),
        ((q_nope, q_pe, ckv, kpe, out, lse, True, out), ValueError, r"profiler_buffer: got Tensor, wanted None"),
        (
            (q_nope, q_pe, ckv, kpe, out, lse, True, None, lse),
            ValueError,
            r"page_table: got None, wanted all or none of kv_len, page_table",
        ),
        ((q_nope.clone().requires_grad_(), q_pe, ckv, kpe), GradientError, r"has no gradient"),
    ):
        with pytest.raises(error, match=message):
            wrapper.run(*arguments)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_bad_wrappers(device):
    with pytest.raises(ValueError, match=r"BatchMLAPagedAttentionWrapper: backend: got 'cudnn', wanted one of"):
        flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), backend="cudnn")
    with pytest.raises(TypeError, match=r"qo_indptr: got NoneType, wanted Tensor"):
        flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), use_cuda_graph=True)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"backend: got 'fa3', wanted 'auto', 'fa2' or .* on cpu"):
            flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), backend="fa3")
    small = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match=r"float_workspace_buffer: got 64 bytes, wanted"):
        Batch([1], [20000], 128, 64, torch.float16, device).plan(small)


def test_a_missing_page():
    batch = Batch([1], [100], 16, 16, torch.float16, "cpu")
    wrapper = batch.planned()
    with pytest.raises(ValueError, match=r"pages, wanted at least \d+ for the tables of plan\(\)"):
        wrapper.run(batch.q_nope, batch.q_pe, batch.ckv[:1], batch.kpe[:1])
    batch.tables[2][0] = -1
    with pytest.raises(ValueError, match=r"kv_indices: got -1, wanted at least 0"):
        batch.plan(wrapper)


def test_generators():
    half = (torch.float16,) * 3
    spec = flashinfer.gen_batch_mla_module("auto", *half, torch.int32, 512, 64, False, device="cpu")
    assert spec.name == "mla_cpu" and dict(spec.coverage) == {"dtypes": ("float16",)}
    eight = (torch.float16, torch.float8_e4m3fn, torch.float16, torch.int32, 512, 64)
    spec = flashinfer.gen_batch_mla_module("auto", *eight, device="cpu")
    assert dict(spec.coverage) == {"dtypes": ("float16:float8_e4m3fn",)}
    assert flashinfer.gen_batch_mla_module("fa3", *half, torch.int32, 512, 64, False).name == "mla_sm90a"
    assert flashinfer.gen_batch_decode_mla_module(*half, torch.int32, 512, 128, device="cuda").name == "mla_cuda"
    for backend, name in (("fa3", "mla_profiler_sm90a"), ("fa2", "mla_profiler_cuda")):
        spec = flashinfer.gen_batch_mla_module(backend, *half, torch.int32, 512, 64, True, device="cuda")
        assert spec.name == name and dict(spec.config)["PROFILER"] is True
    for change, message in (
        ({0: "cudnn"}, "backend: got 'cudnn'"),
        ({2: torch.bfloat16}, "got float16, bfloat16, float16, wanted one for all"),
        ({4: torch.int64}, "dtype_idx: got torch.int64, wanted int32"),
        ({5: 256}, "head_dim_ckv: got 256, wanted 512"),
    ):
        given = ["auto", *half, torch.int32, 512, 64, False]
        for place, value in change.items():
            given[place] = value
        with pytest.raises(ValueError, match=message):
            flashinfer.gen_batch_mla_module(*given, device="cpu")
    assert flashinfer.gen_batch_mla_module("auto", *eight, device="cuda").name == "mla_cuda"
    assert flashinfer.gen_batch_mla_module("fa3", *eight, device="cuda").name == "mla_cuda"
    with pytest.raises(ValueError, match="dtypes: got float32, wanted a subset of"):
        flashinfer.gen_batch_mla_module("auto", *(torch.float32,) * 3, torch.int32, 512, 64, device="cuda")
