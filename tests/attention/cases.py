"""Calls of attention's operators, functions and wrappers, with and without gradients.

``support/attention_samples.py`` has the functions' other arguments, because a plan makes more than one call
of them.
"""

from __future__ import annotations

from typing import Any

import torch

import flashinfer
from flashinfer._attention.batch_schedule import schedule_layout_of
from flashinfer._attention.lists import Shape
from flashinfer._attention.signature import CallArguments, Parameters

from ..support import attention_samples
from ..support.cases import Case, Cases, randn


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return calls of functions without a plan. tests/attention/test_bound.py covers the modules."""
    q, k, v = (randn(n, heads, 64, device=device).half() for n, heads in ((3, 4), (9, 2), (9, 2)))
    lse, bits = randn(3, 4, device=device), torch.full((4,), 0b10110111, dtype=torch.uint8, device=device)
    masked, parameters = CallArguments(mask_mode=2, custom_mask=bits), Parameters(sm_scale=0.125)
    schedule_layout = schedule_layout_of(Shape(4, 2, 64, 64, *[torch.float16] * 3), 2, 1, 16, 7)
    plan, kv_indptr, lens = (torch.zeros(n, dtype=torch.int32, device=device) for n in (schedule_layout.lists, 3, 2))
    numbers, scale = torch.zeros(4, dtype=torch.float64, device=device), torch.ones(1, device=device)
    sizes = (2, 1, 4096, 300, 2, 2, 16, 1, -1, 7)
    return attention_samples.operator_calls(device) | {
        "schedule_batch": [
            (plan, kv_indptr, None, lens + 900, None, None, *sizes),
            (plan.clone(), kv_indptr.clone(), numbers, lens + 3, kv_indptr + 1, scale, *sizes),
        ],
        "attend": [
            ("decode", "sample", "auto", q[:1], k, v, q[:1].clone(), None, *CallArguments(), *parameters),
            ("prefill", "sample", "auto", q, k, v, q.clone(), lse, *masked, *parameters),
        ],
    }


def trained(device: str) -> dict[str, Case]:
    """Return the functions and wrappers of attention, differentiable or not."""
    dtype = torch.float32 if device == "cpu" else torch.float16

    def inputs(*lengths: int, heads: tuple[int, ...] = (6, 2, 2)) -> dict[str, Any]:
        shapes = zip(lengths, heads, strict=True)
        return {
            name: torch.randn(n, count, 64, device=device, dtype=dtype)
            for name, (n, count) in zip("qkv", shapes, strict=True)
        }

    def causal(**tensors: torch.Tensor) -> Any:
        return flashinfer.single_prefill_with_kv_cache(**tensors, causal=True)

    def decode(n: int) -> dict[str, Any]:
        return inputs(1, 2 * n, 2 * n) | dict(q=torch.randn(6, 64, device=device, dtype=dtype))

    def ragged(**tensors: torch.Tensor) -> Any:
        return wrapper.run(**tensors)

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=device))
    qo_indptr, kv_indptr = (torch.tensor(indptr, dtype=torch.int32) for indptr in ([0, 4, 9], [0, 8, 18]))
    wrapper.plan(qo_indptr, kv_indptr, 6, 2, 64, causal=True, q_data_type=dtype)
    return {
        "single_prefill_with_kv_cache": Case(causal, lambda n: inputs(n, 2 * n, 2 * n), ("sm_scale",), ("q", "k", "v")),
        "single_decode_with_kv_cache": Case(flashinfer.single_decode_with_kv_cache, decode, differentiable=("q",)),
        "BatchPrefillWithRaggedKVCacheWrapper.run": Case(
            ragged, lambda _: inputs(9, 18, 18), differentiable=("q", "k", "v")
        ),
    }


CASES = Cases(operators, trained=trained)
