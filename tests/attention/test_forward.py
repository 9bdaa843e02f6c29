"""Options of forward(): the lists of one plan serve all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.lists import Scheduler

from ..support.attention_oracle import (
    Paged,
    assert_near,
    batch_attention,
    drawn,
    indptr_of,
    int32,
    variant_dtype,
    workspace,
)

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
LAYERS: list[dict[str, Any]] = [  # of models with alternating layers
    dict(window_left=-1, logits_soft_cap=30.0, sm_scale=0.1),
    dict(window_left=7, logits_soft_cap=50.0, sm_scale=0.2),
    dict(window_left=-1, logits_soft_cap=50.0, sm_scale=0.2),
    dict(window_left=3, logits_soft_cap=30.0, sm_scale=0.1),
    dict(window_left=7),
    {},
]


@pytest.fixture
def plans(monkeypatch) -> list[Any]:
    """Record the lists that plans make."""
    made, make = [], Scheduler.make

    def counted(self: Scheduler, *args: Any) -> Any:
        made.append(make(self, *args))
        return made[-1]

    monkeypatch.setattr(Scheduler, "make", counted)
    return made


class Served:
    """A wrapper as engines use it: begin_forward() takes lengths, forward() every other option."""

    def __init__(self, kind: str, device: str, **options: Any) -> None:
        self.kind, self.device, self.dtype = kind, device, variant_dtype(device)
        wrappers = {
            "decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            "paged": flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            "ragged": flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        }
        self.wrapper = wrappers[kind](workspace(device))
        self.plan(**options)

    def plan(self, **options: Any) -> None:
        kv_lens = [random.randint(1, 40) for _ in range(3)]
        self.qo_lens = [1 if self.kind == "decode" else random.randint(1, n) for n in kv_lens]
        self.q = drawn((sum(self.qo_lens), HEADS, DIM), self.dtype, self.device)
        paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, self.dtype, self.device)
        self.requests = [paged.request(b) for b in range(3)]
        options = dict(q_data_type=self.dtype) | options
        if self.kind == "decode":
            self.inputs: tuple[Any, ...] = (paged.cache,)
            self.wrapper.begin_forward(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE, **options)
        elif self.kind == "paged":
            self.inputs = (paged.cache,)
            tables = indptr_of(self.qo_lens), *paged.tables_on("cpu")
            self.wrapper.begin_forward(*tables, HEADS, KV_HEADS, DIM, PAGE, **options)
        else:
            self.inputs = tuple(
                torch.cat([request[i] for request in self.requests]).to(self.dtype).to(self.device) for i in range(2)
            )
            self.wrapper.begin_forward(indptr_of(self.qo_lens), indptr_of(kv_lens), HEADS, KV_HEADS, DIM, **options)

    def check(self, **options: Any) -> None:
        want, _ = batch_attention(self.q, self.qo_lens, self.requests, **options)
        assert_near(self.wrapper.forward(self.q, *self.inputs, **options), want)


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_layers_that_alternate(kind, device, plans):
    served = Served(kind, device)
    causal: dict[str, Any] = {} if kind == "decode" else dict(causal=True)
    for step in range(2):
        for layer in LAYERS:
            served.check(**layer, **causal)
        served.check()
        assert len(plans) == step + 1, "options of forward() made a plan"
        served.plan()


def test_options_stay_until_the_next_plan(device):
    served = Served("paged", device)
    served.check(causal=True, sm_scale=0.3)
    want, _ = batch_attention(served.q, served.qo_lens, served.requests, causal=True, sm_scale=0.3)
    assert_near(served.wrapper.run(served.q, *served.inputs), want)
    served.plan()
    assert_near(
        served.wrapper.run(served.q, *served.inputs),
        batch_attention(served.q, served.qo_lens, served.requests)[0],
    )


def test_lists_with_too_few_keys_are_remade(device, plans):
    """New lists are made once, for the keys of all options so far."""
    served = Served("paged", device, causal=True, window_left=2)
    options: list[dict[str, Any]] = [
        dict(causal=True, window_left=2), dict(causal=True, window_left=1), dict(causal=False, window_left=9),
        dict(causal=True), dict(causal=True, window_left=2), dict(causal=False), dict(causal=False, window_left=9),
    ]  # fmt: skip
    made = []
    for one in options:
        served.check(**one)
        made.append(len(plans))
    assert made == [1, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_position_encodings(mode, device):
    served = Served("decode", device)
    for _ in range(2):
        served.check(pos_encoding_mode=mode)
        served.check()


def test_mistakes(device):
    served = Served("paged", device)
    for message, options in (
        ("forward: pos_encoding_mode: got 'ROPE'", dict(pos_encoding_mode="ROPE")),
        ("forward: sm_scale: got inf", dict(sm_scale=float("inf"))),
    ):
        with pytest.raises(ValueError, match=message):
            served.wrapper.forward(served.q, *served.inputs, **options)
        served.check()
    with pytest.raises(ValueError, match="forward: got no plan"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)).forward(served.q, *served.inputs)


def test_sparse_forward_takes_options(device, plans):
    """Callers of 0.2.7 pass options by position after the scales."""
    rows, columns, block, dtype = 3, 4, 8, variant_dtype(device)
    q, k, v = (
        drawn((n * block, h, DIM), dtype, device) for n, h in ((rows, HEADS), (columns, KV_HEADS), (columns, KV_HEADS))
    )
    blocks = torch.rand(rows, columns) < 0.6
    indptr, indices = indptr_of(blocks.sum(1).tolist()), blocks.nonzero()[:, 1].int()
    mask = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1).to(device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    shape = (rows * block, columns * block, block, block, HEADS, KV_HEADS, DIM)
    wrapper.plan(indptr, indices, *shape, q_data_type=dtype, o_data_type=dtype)
    for cap, scale in ((None, None), (5.0, 0.3), (None, 0.3)):
        want, _ = batch_attention(q, [len(q)], [(k, v)], [mask], logits_soft_cap=cap, sm_scale=scale)
        assert_near(wrapper.forward(q, k, v, None, None, None, "NONE", False, cap, scale, None, None), want)
    assert len(plans) == 1
    with pytest.raises(ValueError, match="forward: pos_encoding_mode: got 'ROPE_LLAMA', wanted 'NONE'"):
        wrapper.forward(q, k, v, pos_encoding_mode="ROPE_LLAMA")

    variable = flashinfer.sparse.VariableBlockSparseAttentionWrapper(workspace(device))
    sizes = torch.full((KV_HEADS, 4), block)
    every = blocks[None].expand(KV_HEADS, -1, -1)
    variable.plan(every, sizes[:, :rows], sizes, HEADS, KV_HEADS, DIM, q_data_type=dtype)
    inputs = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    want, _ = batch_attention(q, [len(q)], [(k, v)], [mask], logits_soft_cap=5.0, sm_scale=0.3)
    assert_near(variable.forward(*inputs, "NONE", False, 5.0, 0.3).transpose(0, 1), want)
    assert len(plans) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@pytest.mark.parametrize("kind", ["decode", "paged"])
def test_captured_layers(kind):
    """begin_forward() before each replay, forward() in the graph, over 50 plans and 8 sets of options."""
    device, batch_size, most = "cuda", 3, 40
    pages = batch_size * -(-most // PAGE)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch_size + 1, pages, batch_size)]
    cache = drawn((pages, 2, PAGE, KV_HEADS, DIM), torch.float16, device)
    qo_lens = [1] * batch_size if kind == "decode" else [2, 3, 1]
    if kind == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, False, *buffers)
        first, causal = (), {}
    else:
        queries = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, queries, *buffers)
        first, causal = (indptr_of(qo_lens),), dict(causal=True)
    q = drawn((sum(qo_lens), HEADS, DIM), torch.float16, device)

    def plan(kv_lens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        counts = [-(-n // PAGE) for n in kv_lens]
        indices = torch.randperm(pages)[: sum(counts)].int()
        last = int32([n - (count - 1) * PAGE for n, count in zip(kv_lens, counts, strict=True)])
        tables = indptr_of(counts), indices, last
        wrapper.begin_forward(*first, *tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
        used = iter(indices.to(device).split(counts))
        rows = [cache[next(used).long()].transpose(1, 2).flatten(0, 1)[:n] for n in kv_lens]
        return [(one[:, 0], one[:, 1]) for one in rows]

    def layers() -> list[torch.Tensor]:
        return [wrapper.forward(q, cache, **layer, **causal) for layer in LAYERS[:4]]

    plan([most] * batch_size)
    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for _ in range(50):
        requests = plan([random.randint(n, most) for n in qo_lens])
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, layer in zip(outs, LAYERS, strict=False):
            assert_near(out, batch_attention(q, qo_lens, requests, **layer, **causal)[0])
