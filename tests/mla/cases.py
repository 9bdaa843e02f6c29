"""Calls of the operators of multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._attention.signature import PlanNumbers

from ..support.attention_oracle import int32, workspace
from ..support.cases import Cases
from ..support.mla_samples import SCALE, Batch


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    batch = Batch([1, 3], [70, 20], 16, 16, torch.bfloat16, device, causal=True)
    room = workspace(device)
    buffer = torch.zeros(1 << 12, dtype=torch.int32)
    planned = batch.planned()._planned
    out = torch.zeros_like(batch.q_nope)
    lse = torch.zeros(out.shape[:2], device=device)
    sinks = torch.randn(16, device=device)
    tables = planned.kv_indptr, planned.kv_indices, planned.lists[: 1 << 12].clone(), planned.sizes
    runs: list[tuple[Any, ...]] = [
        (*batch.inputs, out, lse, *tables, room[: 1 << 20], True, SCALE, 1.0, 1.0, None, None),
        (*batch.inputs, out.clone(), None, *tables, None, False, SCALE, 0.5, 1.0, None, sinks),
    ]
    numbers = PlanNumbers(16, 1, 512, 512, 0, 0, 0, mask_mode=1, page_size=16).tensor()
    plans: list[tuple[Any, ...]] = [
        (room, buffer, numbers, int32([0, 1, 4]), int32([70, 20]), None, None, None),
        (room, buffer.clone(), numbers, None, None, int32([0, 5, 7]), int32([0, 1, 2, 3, 4, 5, 6]), int32([6, 4])),
    ]
    eight = Batch([1, 3], [70, 20], 16, 16, torch.bfloat16, device, causal=True, kv_dtype=torch.float8_e4m3fn)
    eight.draw_scales()
    scaled = eight.planned()._planned
    its_tables = scaled.kv_indptr, scaled.kv_indices, scaled.lists[: 1 << 12].clone(), scaled.sizes
    runs_scaled: list[tuple[Any, ...]] = [
        (*eight.inputs, out.clone(), None, *its_tables, None, True, SCALE, 1.0, 0.5, eight.scales, sinks)
    ]
    # A buffer of one word holds no event, whose times would differ from call to call.
    events = torch.zeros(1, dtype=torch.int64, device=device)
    return {
        "mla_plan": plans,
        "mla_run": runs,
        "mla_plan+scaled": [(room, buffer.clone(), *plan[2:]) for plan in plans],
        "mla_run+scaled": runs_scaled,
        "mla_plan+profiler": [(room, buffer.clone(), *plan[2:]) for plan in plans],
        "mla_run+profiler": [(*run[:4], run[4].clone(), *run[5:], events.clone()) for run in runs],
    }


CASES = Cases(operators)
