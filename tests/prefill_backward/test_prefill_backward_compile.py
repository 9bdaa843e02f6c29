"""Gradients of attention through compiled graphs: one graph, and the values of eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer
from flashinfer._attention.operators import builtin_operators
from flashinfer.jit.modules._attention import KERNELS

from ..support.attention_oracle import indptr_of, workspace
from .test_prefill_backward import small_place, tensors

HEADS = (6, 2)


pytestmark = pytest.mark.usefixtures("cold_dynamo")


def check(compiled: Any, eager: Any, leaves: list[torch.Tensor], *rest: Any) -> None:
    """Return results and gradients of both, with equal gradients of the results."""
    results = [function(*leaves, *rest) for function in (compiled, eager)]
    grads = [torch.randn_like(one) for one in results[0]]
    found = [torch.autograd.grad(one, leaves, grads) for one in results]
    for got, want in zip((*results[0], *found[0]), (*results[1], *found[1]), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "given", [dict(causal=True), dict(pos_encoding_mode="ALIBI"), dict(logits_soft_cap=5.0)], ids=str
)
def test_lengths_make_one_graph(given, device):
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = flashinfer.single_prefill_with_kv_cache(q * 2, k, v, return_lse=True, **given)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 9, 40):
        check(compiled, step, tensors(small_place(device), size, 2 * size + 1, HEADS))
    assert counters["stats"]["unique_graphs"] == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(compiled, step, tensors(small_place(device), 33, 70, HEADS))


@pytest.mark.parametrize("number", ["sm_scale", "window_left", "logits_soft_cap"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_twelve_values_of_a_number_make_two_graphs_at_most(number, dynamic, device):
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, value: float) -> tuple[torch.Tensor, ...]:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **{number: value})

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for value in range(2, 14):
        check(compiled, step, tensors(small_place(device), 9, 31, HEADS), value if "left" in number else 0.3 * value)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def test_masks(device):
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask),)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 9, 40):
        mask = torch.rand(size, 2 * size + 1, device=device) < 0.5
        check(compiled, step, tensors(small_place(device), size, 2 * size + 1, HEADS), mask)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_wrapper_planned_before_makes_one_graph_of_all_plans(device):
    place = small_place(device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return wrapper.run(q * 2, k, v, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for qo_lens, kv_lens in (([3, 0, 20, 9], [40, 3, 21, 1]), ([5, 60], [7, 70]), ([1] * 9, [8] * 9)):
        wrapper.plan(indptr_of(qo_lens), indptr_of(kv_lens), *HEADS, 64, causal=True, q_data_type=place[1])
        check(compiled, step, tensors(place, sum(qo_lens), sum(kv_lens), HEADS))
    assert counters["stats"]["unique_graphs"] == 1


def test_plans_with_other_kernels_make_no_graph_of_their_own(device, monkeypatch):
    """One graph runs plans for which ``auto`` chooses different kernels.

    The choice is simulated, so that every machine makes it. The portable kernels replace Hopper's.
    """
    chosen: list[str] = []
    found: list[str] = []

    def choose(*_: object) -> str:
        return chosen[-1]

    def operators(family: str, backend: str, dtypes: Any, head_dims: Any, variant: int, kernels: str = "") -> Any:
        found.append(kernels)
        return replace(builtin_operators(family, backend, dtypes, head_dims, variant), kernels=kernels)

    monkeypatch.setattr("flashinfer._attention.planner.choose", choose)
    for module in ("events", "planner", "traced"):
        monkeypatch.setattr(f"flashinfer._attention.{module}.builtin_operators", operators)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    compiled = torch.compile(
        lambda q, k, v: wrapper.run(q, k, v, return_lse=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for kernels, qo_lens, kv_lens in (
        (device, [3, 20], [40, 21]),
        (KERNELS["fa3"], [5, 60], [7, 70]),
        (device, [1, 2], [8, 8]),
    ):
        chosen.append(kernels)
        wrapper.plan(
            indptr_of(qo_lens), indptr_of(kv_lens), *HEADS, 64, causal=True, q_data_type=small_place(device)[1]
        )
        found.clear()
        q, k, v = (x.detach() for x in tensors(small_place(device), sum(qo_lens), sum(kv_lens), HEADS))
        got = compiled(q, k, v)
        assert found == [kernels]
        torch.testing.assert_close(got, wrapper.run(q, k, v, return_lse=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_no_gradient_needs_no_operator_of_gradients(device):
    """A graph of inference holds no operator of gradients."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(flashinfer.single_prefill_with_kv_cache, fullgraph=True, backend=backend)
    compiled(*(x.detach() for x in tensors(small_place(device), 5, 9, HEADS)))
    assert any("attend" in name for name in seen) and not any("autograd" in name for name in seen)
