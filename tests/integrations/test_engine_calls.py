"""Calls as engines make them: as many arguments by position, and the keyword names, of their sources.

SGLang 0.4.9.post1 and 0.5.23, vLLM 0.9.2, 0.32.0 and 0.33.0, LightLLM fc72ffa, mini-sglang 20fcd7f and TensorRT-LLM
aa3dd6f. What the calls compute is compared with float64 where attention is called; other functions have tests of their
own.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from flashinfer.jit.core import check_cuda_arch

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, workspace

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.11
DTYPE = torch.float16


class Batch:
    """Requests in a paged cache, with queries of their last tokens."""

    def __init__(self, device: str, kv_lens: list[int], qo_lens: list[int] | None = None, page_size: int = 1) -> None:
        self.qo_lens = qo_lens or [1] * len(kv_lens)
        self.paged = Paged(kv_lens, page_size, KV_HEADS, DIM, DTYPE, device, form="pair")
        self.q = drawn((sum(self.qo_lens), HEADS, DIM), DTYPE, device)
        self.qo_indptr, (self.indptr, self.indices, self.last) = indptr_of(self.qo_lens), self.paged.tables_on("cpu")
        self.out = torch.full_like(self.q, float("nan"))

    def check(self, out: torch.Tensor, **options: Any) -> None:
        requests = [self.paged.request(b) for b in range(len(self.qo_lens))]
        assert_near(out, batch_attention(self.q, self.qo_lens, requests, **options)[0])


def test_sglang_decodes(device):
    batch = Batch(device, [5, 17, 1])
    for tensor_cores in (False, True):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", use_tensor_cores=tensor_cores)
        tables = [table.to(device) for table in (batch.indptr, batch.indices, batch.last)]
        wrapper.begin_forward(*tables, HEADS, KV_HEADS, DIM, 1, data_type=DTYPE, q_data_type=DTYPE, non_blocking=True)
        out = wrapper.forward(
            batch.q, batch.paged.cache, sm_scale=SCALE, logits_soft_cap=0.0, k_scale=None, v_scale=None
        )
        batch.check(out, sm_scale=SCALE)


def test_sglang_extends(device):
    batch = Batch(device, [9, 30], [4, 7])
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend="auto")
    options = dict(q_data_type=DTYPE, kv_data_type=DTYPE, custom_mask=None, non_blocking=True)
    tables = batch.indptr, batch.indices, batch.last
    paged.begin_forward(batch.qo_indptr, *tables, HEADS, KV_HEADS, DIM, 1, **options)
    out = paged.forward(
        batch.q, batch.paged.cache, causal=True, sm_scale=SCALE, window_left=-1, logits_soft_cap=0.0, k_scale=None,
        v_scale=None,
    )  # fmt: skip
    batch.check(out, causal=True, sm_scale=SCALE)
    # One wrapper attends to cached keys, the other to new ones.
    prefix = [n - m for n, m in zip(batch.paged.kv_lens, batch.qo_lens, strict=True)]
    starts = batch.indptr[:-1].tolist()
    cached = torch.cat([batch.indices[at : at + n] for at, n in zip(starts, prefix, strict=True)])
    paged.begin_forward(
        batch.qo_indptr, indptr_of(prefix), cached, batch.last, HEADS, KV_HEADS, DIM, 1, q_data_type=DTYPE,
        kv_data_type=DTYPE, custom_mask=None, non_blocking=True,
    )  # fmt: skip
    ragged.begin_forward(batch.qo_indptr, batch.qo_indptr, HEADS, KV_HEADS, DIM, q_data_type=DTYPE)
    new = [
        torch.cat([batch.paged.request(b)[x][n:] for b, n in enumerate(prefix)]).to(DTYPE).to(device) for x in (0, 1)
    ]
    one = ragged.forward_return_lse(batch.q, *new, causal=True, sm_scale=SCALE, logits_soft_cap=0.0)
    other = paged.forward_return_lse(batch.q, batch.paged.cache, causal=False, sm_scale=SCALE, logits_soft_cap=0.0)
    merged, _ = flashinfer.cascade.merge_state(*one, *other)
    batch.check(merged, causal=True, sm_scale=SCALE)


def test_sglang_deterministic(device):
    """SGLang 0.5.23 uses splits of one size, or no splits."""
    batch = Batch(device, [5, 170, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_tensor_cores=True, backend="fa2"
    )
    for split in (
        dict(fixed_split_size=64, disable_split_kv=False),
        dict(fixed_split_size=None, disable_split_kv=True),
    ):
        wrapper.begin_forward(
            batch.indptr, batch.indices, batch.last, HEADS, KV_HEADS, DIM, 1, data_type=DTYPE, q_data_type=DTYPE,
            non_blocking=True, **split,
        )  # fmt: skip
        batch.check(wrapper.forward(batch.q, batch.paged.cache, sm_scale=SCALE), sm_scale=SCALE)


def assert_planned(wrapper: Any, causal: bool | None = None) -> None:
    """Make vLLM's assertions before a run."""
    assert wrapper._window_left == -1 and wrapper._logits_soft_cap == 0.0 and wrapper._sm_scale == SCALE
    assert causal is None or wrapper._causal == causal


def test_vllm_0_9(device):
    options: dict[str, Any] = dict(
        sm_scale=SCALE, window_left=-1, logits_soft_cap=None, q_data_type=DTYPE, kv_data_type=DTYPE
    )
    batch = Batch(device, [9, 30], [4, 7], 16)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD")
    tables = [table.to(device) for table in (batch.qo_indptr, batch.indptr, batch.indices, batch.last)]
    prefill.plan(*tables, HEADS, KV_HEADS, DIM, 16, causal=True, **options)
    assert_planned(prefill, True)
    prefill.run(batch.q, batch.paged.cache, k_scale=1.0, v_scale=1.0, out=batch.out)
    batch.check(batch.out, causal=True, sm_scale=SCALE)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD")
    assert callable(cascade.plan) and callable(cascade.run)
    batch = Batch(device, [9, 30], None, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", use_tensor_cores=False)
    tables = [table.to(device) for table in (batch.indptr, batch.indices, batch.last)]
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, 16, pos_encoding_mode="NONE", **options)
    assert_planned(wrapper)
    wrapper.run(batch.q, batch.paged.cache, k_scale=1.0, v_scale=1.0, out=batch.out)
    batch.check(batch.out, sm_scale=SCALE)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 90, 2)]
    graph = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers, "NHD", False)
    graph.plan(*tables, HEADS, KV_HEADS, DIM, 16, pos_encoding_mode="NONE", **options)
    batch.check(graph.run(batch.q, batch.paged.cache), sm_scale=SCALE)


def test_vllm_0_32(device):
    common: dict[str, Any] = dict(
        num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=16, sm_scale=SCALE, window_left=-1, logits_soft_cap=None,
        q_data_type=DTYPE, kv_data_type=DTYPE, o_data_type=DTYPE, fixed_split_size=-1, disable_split_kv=False,
    )  # fmt: skip
    batch = Batch(device, [9, 30], [4, 7], 16)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="auto")
    prefill.plan(
        qo_indptr=batch.qo_indptr, paged_kv_indptr=batch.indptr, paged_kv_indices=batch.indices.to(device),
        paged_kv_last_page_len=batch.last, seq_lens=int32(batch.paged.kv_lens), head_dim_qk=DIM, causal=True, **common,
    )  # fmt: skip
    assert_planned(prefill, True)
    scales = dict(q_scale=1.0, k_scale=1.0, v_scale=1.0, kv_cache_sf=None)
    prefill.run(batch.q, batch.paged.cache, **scales, out=batch.out)
    batch.check(batch.out, causal=True, sm_scale=SCALE)
    batch = Batch(device, [9, 30], None, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, use_tensor_cores=True, backend="auto",
    )  # fmt: skip
    decode.plan(
        indptr=batch.indptr, indices=batch.indices.to(device), last_page_len=batch.last, head_dim=DIM,
        pos_encoding_mode="NONE", data_type=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
        seq_lens=int32(batch.paged.kv_lens), **common,
    )  # fmt: skip
    assert_planned(decode)
    decode.run(batch.q, batch.paged.cache, **scales, out=batch.out, sinks=None)
    batch.check(batch.out, sm_scale=SCALE)
    lse = torch.full(batch.out.shape[:2], float("nan"), device=device)
    decode.run(batch.q, batch.paged.cache, **scales, out=batch.out, lse=lse, return_lse=True, sinks=None)
    assert bool(lse.isfinite().all())


def test_unsupported_arguments_of_newer_engines(device):
    batch = Batch(device, [9, 30], None, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    tables = batch.indptr, batch.indices, batch.last
    for error, message, options in (
        (flashinfer.errors.UnsupportedError, "block_tables: got Tensor, wanted None", dict(block_tables=int32([0]))),
        (ValueError, "fixed_split_size: got 0, wanted a positive number", dict(fixed_split_size=0)),
        (ValueError, "seq_lens: got 1 elements, wanted 2", dict(seq_lens=int32([9]))),
        (TypeError, "seq_lens: got list", dict(seq_lens=[9, 30])),
    ):
        with pytest.raises(error, match=message):
            wrapper.plan(*tables, HEADS, KV_HEADS, DIM, 16, q_data_type=DTYPE, **options)
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, 16, q_data_type=DTYPE)
    for error, message, options in (
        (flashinfer.errors.UnsupportedError, "kv_cache_sf: got Tensor", dict(kv_cache_sf=int32([0]))),
        (ValueError, r"q_len_per_req: got 2, and plan\(\) was called for 1", dict(q_len_per_req=2)),
        (ValueError, r"window_left: got 3, and plan\(\) was called for -1", dict(window_left=3)),
    ):
        with pytest.raises(error, match=message):
            wrapper.run(batch.q, batch.paged.cache, **options)
    batch.check(wrapper.run(batch.q, batch.paged.cache, window_left=-1, q_len_per_req=None))
    with pytest.raises(flashinfer.errors.UnsupportedError, match="backend: got 'trtllm-gen', which needs"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="trtllm-gen")
    with pytest.raises(ValueError, match="backend: got 'fa4', wanted 'auto', 'fa2'"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="fa4")


def test_lightllm(device):
    """Keys and values are slices of one cache with page size 1."""
    kv = drawn((40, 1, 2 * KV_HEADS, DIM), DTYPE, device)
    q, indices = drawn((2, HEADS, DIM), DTYPE, device), torch.randperm(40)[:30].int()
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 40, 2)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1], paged_kv_last_page_len_buffer=buffers[2],
    )  # fmt: skip
    wrapper.plan(
        int32([0, 12, 30]).to(device), indices.to(device), int32([1, 1]).to(device), HEADS, KV_HEADS, DIM, 1,
        q_data_type=DTYPE, kv_data_type=DTYPE, non_blocking=True,
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))
    wrapper.run(q, (kv[:, :, :KV_HEADS, :], kv[:, :, KV_HEADS:, :]), out=out, return_lse=False)
    rows = [kv[part.long().to(device), 0] for part in indices.split([12, 18])]
    want, _ = batch_attention(q, [1, 1], [(one[:, :KV_HEADS], one[:, KV_HEADS:]) for one in rows])
    assert_near(out, want)


def test_tensorrt_llm(device):
    """New tokens are appended before the attention call."""
    check_cuda_arch()
    qo_lens, kv_lens, page_size = [3, 1], [10, 7], 4
    batch = Batch(device, kv_lens, qo_lens, page_size)
    k, v = (drawn((4, KV_HEADS, DIM), DTYPE, device) for _ in range(2))
    qo_indptr, indptr, indices, last = (
        table.to(device) for table in (batch.qo_indptr, batch.indptr, batch.indices, batch.last)
    )
    seq_lens = flashinfer.get_seq_lens(indptr, last, page_size)
    batch_indices, positions = flashinfer.get_batch_indices_positions(qo_indptr, seq_lens, 4)
    flashinfer.page.append_paged_kv_cache(
        append_key=k, append_value=v, batch_indices=batch_indices, positions=positions,
        paged_kv_cache=batch.paged.cache, kv_indices=indices, kv_indptr=indptr, kv_last_page_len=last, kv_layout="NHD",
    )  # fmt: skip
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
    wrapper.plan(
        qo_indptr, indptr, indices, last, HEADS, KV_HEADS, DIM, page_size, causal=True, sm_scale=SCALE, window_left=-1,
        q_data_type=DTYPE, kv_data_type=DTYPE,
    )  # fmt: skip
    wrapper.run(batch.q, batch.paged.cache, out=batch.out)
    requests, at = [], 0
    for b, new in enumerate(qo_lens):
        before = batch.paged.request(b)
        requests.append(tuple(
            torch.cat([old[: kv_lens[b] - new].to(device), x[at : at + new].float()]) for old, x in zip(before, (k, v), strict=True)
        ))  # fmt: skip
        at += new
    assert_near(batch.out, batch_attention(batch.q, qo_lens, requests, causal=True, sm_scale=SCALE)[0])


def test_functions_without_attention(device):
    x, weight = drawn((5, 64), DTYPE, device), drawn((64,), DTYPE, device)
    flashinfer.rmsnorm(x, weight, 1e-6)  # mini-sglang
    flashinfer.rmsnorm(x, weight, 1e-6, enable_pdl=False)  # TensorRT-LLM
    heads = drawn((5, 8, 64), DTYPE, device)[:, 2:5]
    flashinfer.rmsnorm(heads, weight, 1e-6, out=heads)
    flashinfer.fused_add_rmsnorm(x, x.clone(), weight, 1e-6)
    flashinfer.fused_add_rmsnorm(x, x.clone(), weight, 1e-6, enable_pdl=False)
    flashinfer.silu_and_mul(x, out=None)
    flashinfer.gelu_and_mul(x, out=None)
    qkv, cache = drawn((5, 8 * 64), DTYPE, device), torch.rand(16, 64, device=device)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        positions=int32(range(5)).to(device), query=qkv[:, :256], key=qkv[:, 256:384], head_size=64, cos_sin_cache=cache
    )
    out = torch.empty(5, 64, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(1, device=device)
    flashinfer.norm.rmsnorm_quant(out, x, weight, scale, 1e-6)  # SGLang 0.5.23
    flashinfer.norm.fused_add_rmsnorm_quant(out, x, x.clone(), weight, scale, 1e-6)


def test_functions_of_sampling(device):
    sampling = flashinfer.sampling
    logits = torch.randn(4, 100, device=device)
    temperatures, k = torch.rand(4, device=device) + 0.5, torch.full((4,), 5, dtype=torch.int32, device=device)
    p = torch.full((4,), 0.9, device=device)
    probs = sampling.softmax(logits, temperatures, enable_pdl=False)
    tokens = [
        sampling.sampling_from_probs(probs),
        sampling.top_k_sampling_from_probs(probs, k),
        sampling.top_p_sampling_from_probs(probs, p),
        sampling.top_k_top_p_sampling_from_probs(probs, k, p),
        sampling.top_p_sampling_from_probs(probs, p, deterministic=True),
        sampling.top_k_top_p_sampling_from_logits(logits, k, p, deterministic=True),
        sampling.top_p_sampling_from_probs(probs, top_p=p, deterministic=True, check_nan=False, generator=None),
        sampling.sampling_from_logits(logits, deterministic=True, generator=None, check_nan=False),
        sampling.top_k_top_p_sampling_from_probs(probs, k, p, filter_apply_order="joint"),
        sampling.min_p_sampling_from_probs(probs, p),
        # TensorRT-LLM, PIE, KTransformers
        sampling.sampling_from_probs(probs, deterministic=True, generator=None, check_nan=False),
        sampling.top_k_top_p_sampling_from_logits(
            logits, top_k=k, top_p=p, filter_apply_order="top_k_first", deterministic=True, check_nan=False,
            generator=None,
        ),
        sampling.sampling_from_probs(probs, seed=7),
        sampling.top_k_sampling_from_probs(probs, top_k=k, seed=7),
        sampling.top_p_sampling_from_probs(probs, top_p=p, seed=7),
        sampling.min_p_sampling_from_probs(probs, min_p=p, seed=7),
        sampling.top_k_top_p_sampling_from_probs(probs, top_k=k, top_p=p, seed=7),
        sampling.top_k_top_p_sampling_from_logits(logits, k, p, filter_apply_order="joint"),
    ]  # fmt: skip
    rows = [
        sampling.softmax(logits, None, enable_pdl=False),  # TensorRT-LLM
        sampling.softmax(logits=logits, temperature=temperatures),  # SGLang 0.5.23
        sampling.top_k_mask_logits(logits, k),
        sampling.top_k_renorm_probs(probs, k),
        sampling.top_p_renorm_probs(probs, p),
        sampling.top_k_renorm_prob(probs, k),
        sampling.top_p_renorm_prob(probs, p),
    ]
    assert all(one.shape == logits.shape for one in rows)
    values, places = flashinfer.top_k(logits, 5, sorted=True, deterministic=True)
    assert values.shape == places.shape == (4, 5)
    assert all(one.shape == (4,) and bool(((one >= 0) & (one < 100)).all()) for one in tokens)
    draft = probs.view(2, 2, 100)
    target = torch.cat([draft, draft[:, :1]], 1).contiguous()
    sampling.chain_speculative_sampling(draft, k.view(2, 2), target)  # vLLM 0.9.2


def padded(batch: Batch, device: str) -> torch.Tensor:
    """Return a page table, whose rows have any entry after the last page."""
    table = torch.full((len(batch.qo_lens), 1 + max(map(len, batch.paged.tables))), 2**30, dtype=torch.int32)
    for row, pages in zip(table, batch.paged.tables, strict=True):
        row[: len(pages)] = int32(pages)
    return table.to(device)


@pytest.mark.parametrize("q_len", [1, 3])
def test_vllm_0_33_decodes_without_a_plan(q_len, device):
    """vLLM gives a mask of 32 bits for each query if requests have several, and writes to a part of a buffer."""
    batch = Batch(device, [5, 170, 3], [q_len] * 3, 16)
    bits = (2 ** torch.arange(1, q_len + 1) - 1).int()  # causal
    mask = bits.view(torch.uint16).view(1, q_len, 2).expand(5, -1, -1).contiguous().to(device)[:3]
    buffer = torch.full((3 * q_len + 2, HEADS, DIM), float("nan"), dtype=DTYPE, device=device)
    flashinfer.decode.xqa_batch_decode_with_kv_cache(
        query=batch.q, kv_cache=batch.paged.cache, kv_cache_sf=None, workspace_buffer=workspace(device).zero_(),
        block_tables=padded(batch, device), seq_lens=int32(batch.paged.kv_lens, device), max_seq_len=170,
        bmm1_scale=SCALE, bmm2_scale=1.0, window_left=-1, out=buffer[: 3 * q_len], sinks=None, kv_layout="NHD",
        q_len_per_req=q_len, mask=mask if q_len > 1 else None, q_cu_seq_lens=None,
    )  # fmt: skip
    batch.check(buffer[: 3 * q_len], sm_scale=SCALE, causal=True)
    assert buffer[3 * q_len :].isnan().all()


@pytest.mark.parametrize("qo_lens", [[1, 1, 1], [2, 2, 2], [2, 0, 4]], ids=str)
def test_sglang_0_5_23_decodes_without_a_plan(qo_lens, device):
    batch = Batch(device, [5, 170, 30], qo_lens, 16)
    cache = tuple(x.transpose(1, 2) for x in batch.paged.cache)  # HND, strided
    more: dict[str, Any] = dict(q_len_per_req=qo_lens[0]) if len({*qo_lens}) == 1 else dict(
        q_len_per_req=None, max_q_len=4, cum_seq_lens_q=batch.qo_indptr.to(device)
    )  # fmt: skip
    out = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        query=batch.q, kv_cache=cache, workspace_buffer=workspace(device).zero_(),
        block_tables=padded(batch, device), seq_lens=int32(batch.paged.kv_lens, device), max_seq_len=4096,
        bmm1_scale=SCALE, bmm2_scale=1.0, window_left=-1, sinks=None, skip_softmax_threshold_scale_factor=None,
        out=None, out_dtype=DTYPE, kv_cache_sf=None, multi_ctas_kv_counter_buffer=None, **more,
    )  # fmt: skip
    batch.check(out, sm_scale=SCALE, causal=True)


# Function: number of positional arguments, keyword names.
BOUND = {
    "flashinfer.mla.BatchMLAPagedAttentionWrapper": [
        (1, "backend"), (1, "use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend"),
        (1, "use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr"),
    ],
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan": [(13, ""), (9, "causal q_data_type kv_data_type sm_scale")],
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.run": [(5, "out"), (5, "out return_lse"), (5, "return_lse")],
    "flashinfer.gemm.SegmentGEMMWrapper.run": [
        (1, "x weights batch_size weight_column_major seg_indptr weight_indices")
    ],
    "flashinfer.decode.fast_decode_plan": [
        (8, "data_type q_data_type non_blocking fixed_split_size disable_split_kv global_override_indptr_cpu"), (8, ""),
        (1, "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left"
            " logits_soft_cap q_data_type kv_data_type data_type sm_scale rope_scale rope_theta non_blocking"
            " fixed_split_size disable_split_kv"),
    ],
    "flashinfer.autotuner.autotune": [(1, "cache skip_ops"), (0, "")],
}  # fmt: skip


@pytest.mark.parametrize("name", BOUND)
def test_signatures(name):
    what: Any = flashinfer
    for part in name.split(".")[1:]:
        what = getattr(what, part)
    for count, names in BOUND[name]:
        inspect.signature(what).bind(*range(count), **dict.fromkeys(names.split()))
