"""Wrappers of cascade attention with shared parts of keys, against float64 over each request's keys."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, variant_dtype

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 4


def workspace(device: str) -> torch.Tensor:
    return torch.empty(16 << 20, dtype=torch.uint8, device=device)


class Tree:
    """Requests at the leaves of a tree of key parts in one cache."""

    def __init__(self, levels: list[list[int]], under: list[list[int]], qo_lens: list[int], dtype: torch.dtype, device: str,
                 layout: str = "NHD", form: str = "one") -> None:  # fmt: skip
        self.qo_lens, self.levels = qo_lens, levels
        self.cache = Paged([n for level in levels for n in level], PAGE, KV_HEADS, DIM, dtype, device, layout, form)
        self.parts = [[sum(len(level) for level in levels[:depth]) + part for part in range(len(levels[depth]))]
                      for depth in range(len(levels))]  # fmt: skip
        self.under = under  # level -> request -> its part at that level
        self.device = device

    def tables(self) -> tuple[list[torch.Tensor], ...]:
        """Return ``qo_indptr_arr`` and the pages of every level."""
        qo, indptr, indices, last = [], [], [], []
        for parts, under in zip(self.parts, self.under, strict=True):
            lens = [
                sum(n for n, part in zip(self.qo_lens, under, strict=True) if part == at) for at in range(len(parts))
            ]
            pages = [self.cache.tables[part] for part in parts]
            qo.append(indptr_of(lens).to(self.device))
            indptr.append(indptr_of([len(table) for table in pages]).to(self.device))
            indices.append(int32([page for table in pages for page in table], self.device))
            last.append(self.cache.last_page_len[parts[0] : parts[-1] + 1].to(self.device))
        return qo, indptr, indices, last

    def requests(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return all keys and values of every request."""
        found = []
        for request in range(len(self.qo_lens)):
            pieces = [
                self.cache.request(parts[under[request]]) for parts, under in zip(self.parts, self.under, strict=True)
            ]
            found.append((torch.cat([k for k, _ in pieces]), torch.cat([v for _, v in pieces])))
        return found


def tree(dtype: torch.dtype, device: str, layout: str = "NHD", form: str = "one", depth: int = 3) -> Tree:
    """Return five requests: one part for all, three for some, one for each, and an empty part."""
    levels = [[37], [9, 0, 21], [5, 3, 7, 2, 8]]
    under = [[0] * 5, [0, 0, 1, 2, 2], [0, 1, 2, 3, 4]]
    return Tree(levels[3 - depth :], under[3 - depth :], [2, 1, 5, 2, 3], dtype, device, layout, form)


@pytest.mark.parametrize("layout, form", [("NHD", "one"), ("HND", "pair"), ("NHD", "torn")])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_levels(depth, layout, form, causal, device):
    dtype = torch.float16
    data = tree(dtype, device, layout, form, depth)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(depth, workspace(device), layout)
    assert not wrapper.is_cuda_graph_enabled
    wrapper.plan(*data.tables(), HEADS, KV_HEADS, DIM, PAGE, causal=causal)
    q = drawn((sum(data.qo_lens), HEADS, DIM), dtype, device)
    want, _ = batch_attention(q, data.qo_lens, data.requests(), causal=causal)
    got = wrapper.run(q, data.cache.cache)
    assert got.dtype == dtype
    assert_near(got, want)
    assert torch.equal(wrapper.run(q, data.cache.cache), got), "same inputs, same bits"


def test_options(dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")
    data = tree(dtype, device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device))
    options = {"logits_soft_cap": 5.0 if dtype == variant_dtype(device) else None, "sm_scale": 0.3}
    wrapper.begin_forward(*data.tables(), HEADS, KV_HEADS, DIM, PAGE, True, q_data_type=dtype, **options)
    q = drawn((sum(data.qo_lens), HEADS, DIM), dtype, device)
    want, lse = batch_attention(q, data.qo_lens, data.requests(), causal=True, **options)
    assert_near(wrapper.forward(q, data.cache.cache), want, None, lse)


def test_a_window_of_a_sole_level(device):
    data = tree(torch.float16, device, depth=1)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    wrapper.plan(*data.tables(), HEADS, KV_HEADS, DIM, PAGE, causal=True, window_left=2)
    q = drawn((sum(data.qo_lens), HEADS, DIM), torch.float16, device)
    want, _ = batch_attention(q, data.qo_lens, data.requests(), causal=True, window_left=2)
    assert_near(wrapper.run(q, data.cache.cache), want)


def graph_buffers(data: Tree, device: str) -> list[list[torch.Tensor]]:
    qo, indptr, indices, last = data.tables()
    return [
        [torch.zeros_like(x) for x in qo],
        [torch.zeros_like(x) for x in indptr],
        [torch.zeros(x.numel() + 32, dtype=torch.int32, device=device) for x in indices],
        [torch.zeros_like(x) for x in last],
    ]


def test_tables_in_buffers(device):
    """Later plans use the same buffers for their tables. On CUDA, a captured run follows them."""
    first = tree(torch.float16, device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        3, workspace(device), "NHD", True, *graph_buffers(first, device)
    )
    assert wrapper.is_cuda_graph_enabled
    cache, q = first.cache.cache, drawn((13, HEADS, DIM), torch.float16, device)
    wrapper.plan(*first.tables(), HEADS, KV_HEADS, DIM, PAGE, causal=True)
    wrapper.run(q, cache)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapper.run(q, cache)
    for _ in range(3):
        data = tree(torch.float16, device)
        cache.copy_(data.cache.cache)
        q.copy_(drawn(tuple(q.shape), torch.float16, device))
        wrapper.plan(*data.tables(), HEADS, KV_HEADS, DIM, PAGE, causal=True)
        if device == "cuda":
            graph.replay()
        else:
            out = wrapper.run(q, cache)
        assert_near(out, batch_attention(q, data.qo_lens, data.requests(), causal=True)[0])


def test_other_workspaces(device):
    data = tree(torch.float16, device, depth=2)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    wrapper.plan(*data.tables(), HEADS, KV_HEADS, DIM, PAGE)
    wrapper.reset_workspace_buffer(workspace(device), [workspace(device), workspace(device)])
    q = drawn((sum(data.qo_lens), HEADS, DIM), torch.float16, device)
    with pytest.raises(ValueError, match="MultiLevelCascadeAttentionWrapper.run: got no plan"):
        wrapper.run(q, data.cache.cache)
    wrapper.plan(*data.tables(), HEADS, KV_HEADS, DIM, PAGE)
    assert_near(wrapper.run(q, data.cache.cache), batch_attention(q, data.qo_lens, data.requests())[0])
    with pytest.raises(ValueError, match="int_workspace_buffers: got 1, wanted 2, one for every level"):
        wrapper.reset_workspace_buffer(workspace(device), [workspace(device)])


def test_bad_levels(device):
    name = "MultiLevelCascadeAttentionWrapper"
    with pytest.raises(TypeError, match=f"{name}: num_levels: got str, wanted an integer"):
        flashinfer.MultiLevelCascadeAttentionWrapper("2", workspace(device))
    with pytest.raises(ValueError, match=f"{name}: num_levels: got 0, wanted at least 1"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, workspace(device))
    with pytest.raises(ValueError, match="kv_layout"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NDH")
    with pytest.raises(TypeError, match=f"{name}: qo_indptr_buf_arr: got NoneType, wanted a list"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), use_cuda_graph=True)
    data = tree(torch.float16, device)
    buffers = graph_buffers(data, device)
    with pytest.raises(ValueError, match=f"{name}: paged_kv_indptr_buf_arr: got 2, wanted 3, one for every level"):
        flashinfer.MultiLevelCascadeAttentionWrapper(
            3, workspace(device), "NHD", True, buffers[0], buffers[1][:2], *buffers[2:]
        )
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device))
    q = drawn((sum(data.qo_lens), HEADS, DIM), torch.float16, device)
    with pytest.raises(ValueError, match=f"{name}.run: got no plan, wanted a call of plan"):
        wrapper.run(q, data.cache.cache)
    shape = (HEADS, KV_HEADS, DIM, PAGE)
    qo, *pages = data.tables()
    with pytest.raises(ValueError, match=f"{name}.plan: qo_indptr_arr: got 2, wanted 3, one for every level"):
        wrapper.plan(qo[:2], *pages, *shape)
    with pytest.raises(TypeError, match=f"{name}.plan: qo_indptr_arr: got Tensor, wanted a list"):
        wrapper.plan(qo[0], *pages, *shape)
    with pytest.raises(ValueError, match=f"{name}.plan: window_left: got 3, wanted at most -1 with several levels"):
        wrapper.plan(qo, *pages, *shape, window_left=3)
    with pytest.raises(ValueError, match="pos_encoding_mode: got 'ALIBI', wanted 'NONE' with several levels"):
        wrapper.plan(qo, *pages, *shape, pos_encoding_mode="ALIBI")
    wrapper.plan(qo, *pages, *shape)
    fewer = torch.clamp(qo[1], max=12)
    with pytest.raises(
        ValueError, match=r"qo_indptr_arr: got \[13, 12, 13\] queries at the levels, wanted equal numbers"
    ):
        wrapper.plan([qo[0], fewer, qo[2]], *pages, *shape)
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.run(q, data.cache.cache)  # the first level's plan was overwritten
    wrapper.plan(qo, *pages, *shape)
    with pytest.raises(TypeError, match="q: got torch.bfloat16"):
        wrapper.run(q.bfloat16(), data.cache.cache)
    with pytest.raises(ValueError, match="q: got 2 dimensions, wanted 3"):
        wrapper.run(q[0], data.cache.cache)


# --- shared prefixes ---


def shared(dtype: torch.dtype, device: str, layout: str, length: int = 41):
    """Return keys and values that all requests share, as an argument and for the oracle."""
    k, v = (drawn((length, KV_HEADS, DIM), dtype, device) for _ in range(2))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    return given, (k.cpu().float(), v.cpu().float())


def with_prefix(prefix, paged: Paged) -> list[tuple[torch.Tensor, torch.Tensor]]:
    own = [paged.request(b) for b in range(len(paged.kv_lens))]
    return [(torch.cat([prefix[0], k]), torch.cat([prefix[1], v])) for k, v in own]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode_with_a_shared_prefix(layout, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")
    paged = Paged([3, 0, 17, 8], PAGE, KV_HEADS, DIM, dtype, device, layout)
    given, prefix = shared(dtype, device, layout)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    wrapper.begin_forward(*paged.tables_on(device), HEADS, KV_HEADS, DIM, PAGE, dtype)
    q = drawn((4, HEADS, DIM), dtype, device)
    for options in ({}, {"sm_scale": 0.4}):
        want, lse = batch_attention(q, [1] * 4, with_prefix(prefix, paged), **options)
        assert_near(wrapper.forward(q, *given, paged.cache, **options), want, None, lse)
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.forward(q, *given, paged.cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_with_a_shared_prefix(layout, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")
    qo_lens = [3, 1, 6, 2]
    paged = Paged([3, 1, 17, 8], PAGE, KV_HEADS, DIM, dtype, device, layout)
    given, prefix = shared(dtype, device, layout)
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    q = drawn((sum(qo_lens), HEADS, DIM), dtype, device)
    with pytest.raises(ValueError, match=r"forward: got no plan, wanted a call of begin_forward\(\)"):
        wrapper.forward(q, *given, paged.cache)
    tables = (indptr_of(qo_lens).to(device), *paged.tables_on(device))
    wrapper.begin_forward(*tables, HEADS, KV_HEADS, DIM, PAGE)
    for table in tables:
        table.zero_()  # the caller may reuse its tables
    for options in ({}, {"causal": True}, {"causal": True, "sm_scale": 0.4}):
        want, lse = batch_attention(q, qo_lens, with_prefix(prefix, paged), **options)
        assert_near(wrapper.forward(q, *given, paged.cache, **options), want, None, lse)
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.forward(q, *given, paged.cache)
    with pytest.raises(TypeError, match="begin_forward: qo_indptr: got torch.float32, wanted torch.int32"):
        wrapper.begin_forward(tables[0].float(), *tables[1:], HEADS, KV_HEADS, DIM, PAGE)
