"""A program that uses the wrappers as mini-sglang's backend does: the calls of its attention/fi.py in their order.

Every token is a page. A wrapper for prefill, one for decode and one for each size of a captured batch share both
workspaces; plans come from pinned tables on the host. Batches of prefill, with and without a cached prefix, take turns with
batches of decode, which are padded to a captured size by requests of one dummy token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashinfer

from ..support.attention_oracle import assert_near, batch_attention, drawn

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
DTYPE, SLOTS, MOST = torch.float16, 900, 60
SIZES = (2, 4)  # of captured batches


class Backend:
    def __init__(self, device: str) -> None:
        self.device, self.pinned = device, device == "cuda"
        space = torch.empty(32 << 20, dtype=torch.uint8, device=device)
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="NHD", backend="fa2")
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            space, use_tensor_cores=True, kv_layout="NHD", backend="fa2"
        )
        self.ints = self.prefill._int_workspace_buffer
        self.decode._int_workspace_buffer = self.ints
        self.cache = [drawn((2, SLOTS, 1, KV_HEADS, DIM), DTYPE, device) for _ in range(LAYERS)]
        self.free = random.sample(range(1, SLOTS), SLOTS - 1)
        self.requests: list[list[int]] = []  # slots of their tokens; slot 0 is the dummy's
        starts, ones = (torch.ones(n, dtype=torch.int32, device=device) for n in (max(SIZES) + 1, max(SIZES)))
        indices = torch.zeros(max(SIZES) * MOST, dtype=torch.int32, device=device)
        self.buffers = starts, indices, ones
        self.graphs = {size: self.captured(size) for size in SIZES}

    def on_host(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=self.pinned)

    def plan(self, wrapper: Any, batch: list[list[int]], qo_lens: list[int] | None = None) -> None:
        """The keyword names of plan() there."""
        lens = [len(slots) for slots in batch]
        common: dict[str, Any] = dict(
            num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=1, pos_encoding_mode="NONE", seq_lens=self.on_host(lens),
            q_data_type=DTYPE, kv_data_type=DTYPE, non_blocking=True,
        )  # fmt: skip
        indptr = self.on_host([0, *lens]).cumsum_(dim=0)
        indices = torch.tensor([slot for slots in batch for slot in slots], dtype=torch.int32).to(self.device)
        last = self.on_host([1] * len(batch))
        if qo_lens is None:
            wrapper.plan(indptr=indptr, indices=indices, last_page_len=last, head_dim=DIM, data_type=DTYPE, **common)
        else:
            wrapper.plan(
                qo_indptr=self.on_host([0, *qo_lens]).cumsum_(dim=0), paged_kv_indptr=indptr, paged_kv_indices=indices,
                paged_kv_last_page_len=last, head_dim_qk=DIM, causal=True, **common,
            )  # fmt: skip

    def layers(self, wrapper: Any, q: torch.Tensor) -> list[torch.Tensor]:
        return [wrapper.run(q=q, paged_kv_cache=(cache[0], cache[1])) for cache in self.cache]

    def captured(self, size: int) -> tuple[Any, torch.Tensor, Any, list[torch.Tensor]]:
        starts, indices, ones = self.buffers
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            self.decode._float_workspace_buffer, kv_layout="NHD", use_tensor_cores=True,
            indptr_buffer=starts[: size + 1], indices_buffer=indices, last_page_len_buffer=ones[:size],
        )  # fmt: skip
        wrapper._backend = "fa2"
        wrapper._int_workspace_buffer = self.ints
        q = torch.zeros(size, HEADS, DIM, dtype=DTYPE, device=self.device)
        self.plan(wrapper, [[0]] * size)
        outs, graph = self.layers(wrapper, q), None
        if self.device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = self.layers(wrapper, q)
        return wrapper, q, graph, outs

    def check(self, outs: list[torch.Tensor], q: torch.Tensor, batch: list[list[int]], qo_lens: list[int]) -> None:
        for out, cache in zip(outs, self.cache, strict=True):
            rows = [(cache[0, slots, 0], cache[1, slots, 0]) for slots in batch]
            want, _ = batch_attention(q, qo_lens, rows, causal=True)
            assert_near(out[: len(want)], want)

    def extend(self) -> None:
        """Prefill: some new requests, and the rest of one whose first tokens are cached already."""
        fresh = [[self.free.pop() for _ in range(random.randint(1, 20))] for _ in range(random.randint(1, 2))]
        qo_lens = [len(slots) for slots in fresh]
        if self.requests and random.random() < 0.5:
            prefix = random.choice(self.requests)[:9]
            fresh.append(prefix + [self.free.pop() for _ in range(5)])
            qo_lens.append(5)
        q = drawn((sum(qo_lens), HEADS, DIM), DTYPE, self.device)
        self.plan(self.prefill, fresh, qo_lens)
        self.check(self.layers(self.prefill, q), q, fresh, qo_lens)
        self.requests += fresh

    def step(self) -> None:
        """Decode: one token more for each request, by a graph where one is large enough."""
        for slots in self.requests:
            slots.append(self.free.pop())
        count = len(self.requests)
        q = drawn((count, HEADS, DIM), DTYPE, self.device)
        size = next((size for size in SIZES if size >= count), None)
        if size is None:
            self.plan(self.decode, self.requests)
            outs = self.layers(self.decode, q)
        else:
            wrapper, held, graph, outs = self.graphs[size]
            self.plan(wrapper, self.requests + [[0]] * (size - count))
            held.zero_()[:count] = q
            if graph is None:
                outs = self.layers(wrapper, held)
            else:
                for out in outs:
                    out.fill_(float("nan"))
                graph.replay()
        self.check(outs, q, self.requests, [1] * count)
        if max(map(len, self.requests)) >= MOST - 1 or len(self.free) < 300:
            for slots in self.requests:
                self.free += [slot for slot in slots if slot not in self.free]
            self.requests = []


@pytest.mark.parametrize("steps", [30])
def test_serving(steps, device):
    backend = Backend(device)
    for _ in range(steps):
        if not backend.requests or (random.random() < 0.4 and len(backend.requests) < 6):
            backend.extend()
        else:
            backend.step()
