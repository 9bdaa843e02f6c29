"""Calls of the operators of attention's gradients. tests/attention/cases.py has the functions."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Cases


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(n, heads, 64, device=device, dtype=dtype) for n, heads in ((7, 4), (9, 2), (9, 2)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True)
    one = (None, None, None, None, 0, 0, -1, 0, 0.0, 0.125, 1.0, 1e4)
    tables = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    numbers = torch.tensor([0.125, 5.0, 1.0, 1e4], dtype=torch.float64)
    mask = torch.full((9,), 255, dtype=torch.uint8, device=device)
    masked = (*tables, mask, numbers, 0, 2, 3, 2, 1.0, 1.0, 1.0, 1.0)
    wide = [x.double().requires_grad_() for x in (q, k, v)] if device == "cpu" else leaves
    return {
        "prefill_autograd": [(*leaves, out, lse, *one), (*wide, None, None, *masked)],
        "prefill_gradients": [(q, k, v, out, lse, out, lse, *one), (q, k, v, out, lse, out, lse, *masked)],
        "prefill_backward": [
            (q, k, v, out, lse, out, lse, *tables, mask, torch.ones(4, device=device), 0, 2, 3, 5.0, 0.125),
            (q, k, v, out, lse, out, lse, None, None, None, None, 0, 1, -1, 0.0, 0.125),
        ],
    }


CASES = Cases(operators)
