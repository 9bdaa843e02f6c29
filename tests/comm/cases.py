"""Calls of the all-reduce on a group of one rank, and its oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from flashinfer.comm.alltoall import MoeAlltoAll
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.workspace import TRTLLMAllReduceFusionWorkspace

from ..support.cases import Cases, randn

EPS = 1e-5


@cache
def one_rank(device: str) -> TRTLLMAllReduceFusionWorkspace:
    return TRTLLMAllReduceFusionWorkspace(1, 0, 8, 64, torch.float32, device=device)


@cache
def alone(device: str) -> MoeAlltoAll:
    """Return an object of the all-to-all for one rank, after a dispatch."""
    one = MoeAlltoAll(Mapping(), 8, 2, 4, hidden_size=128, device=device)
    one.dispatch(torch.zeros(6, 2, dtype=torch.int32, device=device), [torch.zeros(6, 64, device=device)], 8)
    return one


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x, w = randn(6, 64, device=device), randn(64, device=device)
    workspace = one_rank(device)

    state = (workspace._order, workspace._table)

    def last(quant: int, scale: float = 1.0, group: int = 0) -> tuple[Any, ...]:
        return (*state, quant, scale, None, group, EPS, 0.5, 0, None)

    fused = (x, x.clone(), w, None, torch.empty_like(x), torch.empty_like(x))
    fp8 = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return {
        "allreduce": [(x, torch.empty_like(x), *state, 0, None)],
        "allreduce_norm": [(*fused, *state, EPS, 0.5, 0, None)],
        "allreduce_norm_quant": [
            (*fused, fp8, None, *last(1, 0.25)),
            (*fused, fp8, x.new_empty(6, 1), *last(2)),
            (*fused, fp8, torch.empty(6, 1, dtype=torch.int32, device=device), *last(3, 1.0, 16)),
        ],
        "reduce_scatter": [(x, torch.empty_like(x), *state, None)],
        "all_gather": [(x, torch.empty_like(x), *state, None)],
        **all_to_all(device),
    }


def all_to_all(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return calls of both functions. The second one returns the rows of the first."""
    one = alone(device)
    region, x = one._region, randn(6, 64, device=device)
    assert region is not None
    ids = torch.randint(0, 4, (6, 2), device=device).int()
    most, last = 8, (one._targets, region._order, region._table)
    payloads = (x.view(torch.uint8), ids.view(torch.uint8), None, None, None, None)
    return {
        "moe_dispatch": [(ids, *payloads, *last, most, 4, 1, -1, None)],
        "moe_combine": [(randn(1, most, 64, device=device), torch.empty_like(x), *last, None)],
    }


CASES = Cases(operators)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in float32 in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def normed(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: float) -> torch.Tensor:
    """Return the norm of ``total + residual`` in float64. The sum is that of float32."""
    x = (total.float() + residual.float()).double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight.double() + bias)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check bits, where any NaN equals any other."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(got)[~want.isnan()], bits(want)[~want.isnan()])
