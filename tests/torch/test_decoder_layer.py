"""Tests of a compiled decoder layer of our functions: one graph, and the values of float32.

``benchmarks/`` has the layer, and compares its time with torch's functions.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.decoder_layer import Ours, Requests, Sizes, Torchs, wanted

pytestmark = [
    # torch's own, where Inductor is imported.
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]

SIZES = Sizes(hidden=96, num_qo_heads=4, num_kv_heads=2, head_dim=64, inner=80)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("kind", [Ours, Torchs])
def test_one_graph_with_the_values_of_float32(kind, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch._dynamo.reset()
    counters.clear()
    requests = Requests([random.randint(1, 90) for _ in range(5)], SIZES, device)
    layer = kind(SIZES, requests, device, dtype)
    options = {"mode": "reduce-overhead"} if device == "cuda" else {}
    compiled = torch.compile(layer, fullgraph=True, **options)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(5, SIZES.hidden, device=device).to(dtype)
            before = layer.cache.clone()
            want = wanted(layer, x)
            assert torch.equal(layer.cache, before)
            error = (compiled(x).float() - want).norm(dim=-1) / want.norm(dim=-1)
            assert error.max() <= TOLERANCE[dtype]
            # Only the new token's keys and values were written.
            assert (layer.cache != before).any(-1).sum() == 2 * 5 * SIZES.num_kv_heads
    assert counters["stats"]["unique_graphs"] == 1
    if device == "cuda":
        assert not counters["inductor"]["cudagraph_skips"]


def test_attention_counts(device):
    """Another cache changes the values by more than the tolerance of the test above."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    requests = Requests([40, 70, 3], SIZES, device)
    layer = Ours(SIZES, requests, device, dtype)
    x = torch.randn(3, SIZES.hidden, device=device).to(dtype)
    want = wanted(layer, x)
    layer.cache.normal_()
    with torch.no_grad():
        error = (layer(x).float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.min() > 2 * TOLERANCE[torch.bfloat16]
