"""Tables that are slices of longer ones: offsets may start anywhere in the whole table of pages."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, workspace
from ..support.mla_samples import SCALE, Batch

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SHAPE = (HEADS, KV_HEADS, DIM, PAGE)


class Sliced:
    """Return a paged batch planned from request ``first`` on. Page numbers before its own are invalid."""

    def __init__(self, device: str, page_size: int = PAGE) -> None:
        self.kv_lens = [random.choice([0, 1, 3, 9, 40]) for _ in range(6)] + [7]
        self.qo_lens = [random.randrange(1, 5) for _ in self.kv_lens]
        self.paged = Paged(self.kv_lens, page_size, KV_HEADS, DIM, torch.float16, device)
        self.first = random.choice([1, 3, 5, 6])
        indptr, indices, last = self.paged.tables_on("cpu")
        self.indptr, self.last = indptr[self.first :], last[self.first :]
        self.indices = indices.clone()
        self.indices[: int(self.indptr[0])] = -1
        self.requests = [self.paged.request(b) for b in range(self.first, len(self.kv_lens))]
        self.own_lens = self.qo_lens[self.first :]
        self.qo_start, self.rows = sum(self.qo_lens[: self.first]), sum(self.qo_lens)
        self.qo_indptr = indptr_of(self.qo_lens)[self.first :]

    def tables(self, place: str) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(place) for x in (self.indptr, self.indices, self.last))


def places(device: str) -> list[str]:
    return ["cpu"] if device == "cpu" else ["cpu", device]


def filled(rows: int, device: str) -> torch.Tensor:
    return torch.full((rows, HEADS, DIM), 77.0, device=device).half()


@pytest.mark.parametrize("graph", [False, True])
def test_decode(graph, device):
    for place in places(device):
        batch = Sliced(device)
        count = len(batch.own_lens)
        buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (count + 1, 100, count)] if graph else []
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", graph, False, *buffers)
        q = drawn((count, HEADS, DIM), torch.float16, device)
        want = batch_attention(q, [1] * count, batch.requests)
        out = filled(count, device)
        wrapper.plan(*batch.tables(place), *SHAPE)
        wrapper.run(q, batch.paged.cache, out=out)
        assert_near(out, want[0])
        host = batch.indptr.clone()
        flashinfer.decode.fast_decode_plan(
            wrapper, host.to(place), batch.indices.to(device), batch.last, *SHAPE, q_data_type="float16",
            global_override_indptr_cpu=host,
        )  # fmt: skip
        assert_near(wrapper.run(q, batch.paged.cache), want[0])


def test_cached_module_plan(device):
    batch = Sliced(device, 1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.tables("cpu"), HEADS, KV_HEADS, DIM, 1)
    count, empty = len(batch.own_lens), torch.empty(0).half()
    workspaces = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, torch.empty(0))
    wrapper._cached_module.plan(
        *workspaces, batch.indptr, count, HEADS, KV_HEADS, 1, False, -1, 0.0, DIM, DIM, empty, empty
    )
    q = drawn((count, HEADS, DIM), torch.float16, device)
    assert_near(wrapper.run(q, batch.paged.cache), batch_attention(q, [1] * count, batch.requests)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["rebased queries", "sliced queries"])
def test_prefill(kind, causal, device):
    """vLLM passes queries from 0 with offsets of pages that are a slice."""
    for place in places(device):
        batch = Sliced(device)
        sliced = kind == "sliced queries"
        start = batch.qo_start if sliced else 0
        qo_indptr = batch.qo_indptr if sliced else indptr_of(batch.own_lens)
        q = drawn((start + sum(batch.own_lens), HEADS, DIM), torch.float16, device)
        want = batch_attention(q[start:], batch.own_lens, batch.requests, causal=causal)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(qo_indptr.to(place), *batch.tables(place), *SHAPE, causal=causal)
        out, lse = filled(len(q), device), torch.full((len(q), HEADS), 55.0, device=device)
        wrapper.run(q, batch.paged.cache, out=out, lse=lse, return_lse=True)
        assert_near(out[start:], want[0], lse[start:], want[1])
        assert bool((out[:start] == 77).all()) and bool((lse[:start] == 55).all()), "rows of no request were written"


def test_prefill_with_masks(device):
    batch = Sliced(device)
    lens = batch.kv_lens[batch.first :]
    masks = [torch.rand(q, k) < 0.7 for q, k in zip(batch.own_lens, lens, strict=True)]
    q = drawn((batch.rows, HEADS, DIM), torch.float16, device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    mask = torch.cat([one.flatten() for one in masks]).to(device)
    wrapper.plan(batch.qo_indptr, *batch.tables("cpu"), *SHAPE, custom_mask=mask)
    out, own = wrapper.run(q, batch.paged.cache), q[batch.qo_start :].split(batch.own_lens)
    want = [batch_attention(own[i], [len(own[i])], [batch.requests[i]], masks=[masks[i]])[0] for i in range(len(masks))]
    assert_near(out[batch.qo_start :], torch.cat(want))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_and_its_gradients(layout, device):
    qo_lens, kv_lens, first = [2, 3, 1, 4], [5, 4, 9, 6], 2
    q = drawn((sum(qo_lens), HEADS, DIM), torch.float16, device).requires_grad_()
    k, v = (drawn((sum(kv_lens), KV_HEADS, DIM), torch.float16, device).requires_grad_() for _ in "kv")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(indptr_of(qo_lens)[first:], indptr_of(kv_lens)[first:], HEADS, KV_HEADS, DIM, causal=True)
    turned = [x.transpose(0, 1) if layout == "HND" else x for x in (k, v)]
    start, kv_start = sum(qo_lens[:first]), sum(kv_lens[:first])
    own = [q[start:], k[kv_start:], v[kv_start:]]
    requests = list(zip(own[1].split(kv_lens[first:]), own[2].split(kv_lens[first:]), strict=True))
    want, want_lse = batch_attention(own[0], qo_lens[first:], requests, causal=True)
    with torch.no_grad():
        out, lse = wrapper.run(q, *turned, return_lse=True)
    assert_near(out[start:], want.detach(), lse[start:], want_lse.detach())
    weights = drawn(want.shape, torch.float64)
    wanted = torch.autograd.grad((want * weights).sum(), (q, k, v))
    out, lse = wrapper.run(q, *turned, return_lse=True)
    assert_near(out[start:].detach(), want.detach(), lse[start:].detach(), want_lse.detach())
    got = torch.autograd.grad((out[start:] * weights.to(device)).sum(), (q, k, v))
    for one, other in zip(got, wanted, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 4e-3, error


def test_sinks(device):
    batch = Sliced(device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device))
    wrapper.plan(indptr_of(batch.own_lens), *batch.tables("cpu"), *SHAPE, causal=True)
    q, sinks = drawn((sum(batch.own_lens), HEADS, DIM), torch.float16, device), torch.randn(HEADS, device=device)
    want, _ = batch_attention(q, batch.own_lens, batch.requests, causal=True, sinks=sinks)
    assert_near(wrapper.run(q, batch.paged.cache, sinks, DIM**-0.5), want)


def test_pod(device):
    batch = Sliced(device)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.tables("cpu"), *SHAPE)
    q, q_p = (drawn((rows, HEADS, DIM), torch.float16, device) for rows in (len(batch.own_lens), 5))
    k, v = (drawn((9, KV_HEADS, DIM), torch.float16, device) for _ in "kv")
    got_p, got = wrapper.run(q_p, k, v, q, batch.paged.cache, causal_p=True)
    assert_near(got_p, batch_attention(q_p, [5], [(k, v)], causal=True)[0])
    assert_near(got, batch_attention(q, [1] * len(q), batch.requests)[0])


def test_cascade(device):
    """Both levels have slices. The first level has the same six keys for all requests."""
    batch = Sliced(device)
    count, cache = len(batch.own_lens), batch.paged.cache.nan_to_num(0.5)
    q = drawn((count, HEADS, DIM), torch.float16, device)
    shared = int32([5, 7]), int32([-1] * 5 + [2, 0]), int32([2])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    tables = [list(level) for level in zip(shared, batch.tables("cpu"), strict=True)]
    wrapper.plan([int32([0, count]), indptr_of([1] * count)], *tables, *SHAPE)
    k, v = (cache[[2, 0], i].flatten(0, 1)[: PAGE + 2].cpu() for i in range(2))
    own = [(own_k.cpu(), own_v.cpu()) for own_k, own_v in batch.requests]
    requests = [(torch.cat([k, own_k]), torch.cat([v, own_v])) for own_k, own_v in own]
    want = batch_attention(q, [1] * count, requests)[0]
    assert bool(want.isfinite().all())
    assert_near(wrapper.run(q, cache), want)


def test_batch_attention(device):
    batch = Sliced(device)
    wrapper = flashinfer.BatchAttention("NHD")
    q = drawn((batch.rows, HEADS, DIM), torch.float16, device)
    tables = (batch.qo_indptr, batch.indptr, batch.indices, int32(batch.kv_lens[batch.first :]))
    wrapper.plan(
        *(x.to(device) for x in tables), HEADS, KV_HEADS, DIM, DIM, PAGE, True, None, torch.float16, torch.float16
    )  # fmt: skip
    out, lse = wrapper.run(q, batch.paged.cache)
    want = batch_attention(q[batch.qo_start :], batch.own_lens, batch.requests, causal=True)
    assert_near(out[batch.qo_start :], want[0], lse[batch.qo_start :], want[1])


@pytest.mark.parametrize("inside", ["whole blocks", "mask in blocks", "packed mask", "causal"])
def test_blocks(inside, device):
    """The block rows of a sliced table are those of the matrix."""
    rows, columns, R, C, first = 4, 5, 3, 2, 2
    there = torch.rand(first + rows, columns) < 0.6
    there[0, 0] = True
    indptr, whole = indptr_of(there.sum(1).tolist()), int32(there.nonzero()[:, 1].tolist())
    whole[: int(indptr[first])] = -1
    mask = torch.rand(len(whole), R, C) < 0.5 if "mask" in inside else torch.ones(len(whole), R, C, dtype=torch.bool)
    dense, own = torch.zeros(rows * R, columns * C, dtype=torch.bool), indptr[first:]
    for row in range(rows):
        for at in range(int(own[row]), int(own[row + 1])):
            dense[row * R : (row + 1) * R, int(whole[at]) * C : (int(whole[at]) + 1) * C] = mask[at]
    options = {"mask": mask.to(device)} if inside == "mask in blocks" else {}
    if inside == "packed mask":
        flat = flashinfer.convert_bsr_mask_layout(mask, own)
        options = {"packed_mask": flashinfer.segment_packbits(flat, (own - own[0]) * R * C, bitorder="little")[0]}
        options["packed_mask"] = options["packed_mask"].to(device)
    if inside == "causal":
        positions = torch.arange(rows * R)[:, None] + columns * C - rows * R
        dense &= torch.arange(columns * C)[None] <= positions
    q, k, v = (drawn((n, h, DIM), torch.float16, device) for n, h in ((12, HEADS), (10, KV_HEADS), (10, KV_HEADS)))
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(own, whole, 12, 10, R, C, HEADS, KV_HEADS, DIM, causal=inside == "causal", **options)
    assert_near(wrapper.run(q, k, v), batch_attention(q, [12], [(k, v)], masks=[dense])[0])


@pytest.mark.parametrize("sliced", [False, True], ids=["rebased queries", "sliced queries"])
def test_latents(sliced, device):
    batch = Batch([2, 1, 3, 2], [20, 5, 40, 17], 16, 8, torch.float16, device)
    qo_indptr, indptr, indices, lens = batch.tables
    start, indices = int(qo_indptr[2]), indices.clone()
    indices[: int(indptr[2])] = -1
    own = qo_indptr[2:] if sliced else qo_indptr[2:] - qo_indptr[2]
    q_nope, q_pe, ckv, kpe = batch.inputs
    if not sliced:
        q_nope, q_pe = q_nope[start:], q_pe[start:]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, qo_indptr=own, kv_indptr=indptr[2:], kv_indices=indices, kv_len_arr=lens[2:])
    out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
    want, want_lse = batch.expected()
    assert_near(out[-5:], want[start:], lse[-5:], want_lse[start:])


def test_decode_of_latents(device):
    batch = Batch([1, 1, 1], [20, 5, 40], 16, 8, torch.float16, device)
    indptr, indices, last = batch.paged.tables_on("cpu")
    indices[: int(indptr[1])] = -1
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr[1:], indices, last[1:], 16, 512, 8, SCALE, data_type=torch.float16)
    q_nope, q_pe, ckv, kpe = batch.inputs
    assert_near(wrapper.run(q_nope[1:], q_pe[1:], ckv, kpe), batch.expected()[0][1:])


def test_append(device):
    """Tokens before a slice of ``append_indptr`` have no request and are skipped."""
    lens, pages, first = [3, 2, 4], [2, 1, 3], 1
    append, indptr = indptr_of(lens).to(device), indptr_of(pages).to(device)
    seq_lens = flashinfer.get_seq_lens(indptr[first:], int32([3, 2], device), PAGE)
    assert seq_lens.tolist() == [3, 10]
    requests, positions = flashinfer.get_batch_indices_positions(append[first:], seq_lens, 9)
    assert requests.tolist() == [-1] * 3 + [0] * 2 + [1] * 4
    assert positions.tolist() == [-1] * 3 + [1, 2] + [6, 7, 8, 9]
    indices = int32([-7, -7, 4, 1, 5, 0], device)
    k, v = (torch.randn(9, 2, 8, device=device) for _ in "kv")
    cache = torch.full((6, 2, PAGE, 2, 8), 9.0, device=device)
    want = cache.clone()
    for token, (page, entry) in enumerate([(4, 1), (4, 2), (5, 2), (5, 3), (0, 0), (0, 1)], start=3):
        want[page, 0, entry], want[page, 1, entry] = k[token], v[token]
    last = int32([3, 2], device)
    flashinfer.append_paged_kv_cache(k, v, requests, positions, cache, indices, indptr[first:], last)
    assert torch.equal(cache, want)
    ckv, kpe = (torch.full((6, PAGE, 8), 9.0, device=device) for _ in range(2))
    flashinfer.append_paged_mla_kv_cache(k[:, 0], v[:, 0], requests, positions, ckv, kpe, indices, indptr[first:], last)
    assert torch.equal(ckv, want[:, 0, :, 0]) and torch.equal(kpe, want[:, 1, :, 0])


def test_offsets_out_of_range(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="indices: got 4 pages, wanted at least 5, the end of indptr"):
        wrapper.plan(int32([3, 5]), int32([0, 1, 2, 3]), int32([1]), *SHAPE)
    with pytest.raises(ValueError, match="indptr: got -2 first, wanted 0 or more"):
        wrapper.plan(int32([-2, 3]), int32([0, 1, 2, 3]), int32([1]), *SHAPE)
    with pytest.raises(ValueError, match="indices: got -4, wanted at least 0"):
        wrapper.plan(int32([3, 4]), int32([-1, -2, -3, -4]), int32([1]), *SHAPE)
