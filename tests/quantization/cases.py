"""Calls of packing."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    bits = torch.ones(37, dtype=torch.uint8, device=device)
    return {
        "packbits": [(bits, False)],
        "segment_packbits": [(bits, torch.tensor([0, 9, 37], dtype=torch.int32, device=device), True)],
    }


def functions(device: str) -> dict[str, Case]:
    def bits(n: int) -> dict[str, Any]:
        return dict(x=torch.randint(0, 2, (8 * n + 3,), dtype=torch.uint8, device=device))

    indptr = torch.tensor([0, 1, 5], dtype=torch.int32, device=device)
    return {
        "packbits": Case(flashinfer.packbits, bits),
        "segment_packbits": Case(flashinfer.segment_packbits, lambda n: bits(n) | dict(indptr=indptr)),
    }


CASES = Cases(operators, functions)
