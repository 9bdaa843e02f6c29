"""Calls of the functions that merge attention states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashinfer

from ..support.cases import Case, Cases, randn


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    v, s = randn(4, 8, 3, 16, device=device).half(), randn(4, 8, 3, device=device)
    return {
        "merge_state": [(v[:, 0], s[:, 0], v[:, 1], s[:, 1])],
        "merge_state_in_place": [(v[:, 0].clone(), s[:, 0].clone(), v[:, 1], s[:, 1], None)],
        "merge_states": [(v, s)],
    }


def functions(device: str) -> dict[str, Case]:
    def states(count: int, *names: str) -> Callable[[int], dict[str, Any]]:
        shape = () if count == 1 else (count,)
        return lambda n: {
            name: randn(n, *shape, 3, *(() if name.startswith("s") else (8,)), device=device) for name in names
        }

    def segments(n: int) -> dict[str, Any]:
        indptr = torch.tensor([0, 2, 2, n], dtype=torch.int32, device=device)
        return dict(v=randn(n, 3, 8, device=device), s=randn(n, 3, device=device), indptr=indptr)

    return {
        "merge_state": Case(flashinfer.merge_state, states(1, "v_a", "s_a", "v_b", "s_b")),
        "merge_state_in_place": Case(
            flashinfer.merge_state_in_place, states(1, "v", "s", "v_other", "s_other"), written=("v", "s")
        ),
        "merge_states": Case(flashinfer.merge_states, states(4, "v", "s")),
        "variable_length_merge_states": Case(flashinfer.cascade.variable_length_merge_states, segments),
    }


CASES = Cases(operators, functions)
