"""Calls of the delta rule for tests that cover every family."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer
from flashinfer import delta_rule

from ..support.cases import Case, Cases


def arguments(device: str, tokens: int, grad: bool = False, batch: int = 2) -> dict[str, Any]:
    q, k = (torch.randn(batch, tokens, 3, 20, device=device) for _ in range(2))
    given = dict(
        q=q,
        k=k / k.norm(dim=-1, keepdim=True),
        v=torch.randn(batch, tokens, 6, 24, device=device),
        g=-torch.rand(batch, tokens, 6, device=device),
        beta=torch.rand(batch, tokens, 6, device=device),
    )
    return {name: one.detach().requires_grad_(grad) for name, one in given.items()}


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    def leaf(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=grad)

    def inputs(grad: bool = False, tokens: int = 7) -> tuple[Any, ...]:
        one = arguments(device, tokens, grad)
        return one["q"], one["k"], one["v"], one["g"], None, one["beta"], leaf(2, 6, 20, 24, grad=grad), None

    def packed() -> tuple[Any, ...]:
        q, k, v, g, _, beta = (None if one is None else one[:1].contiguous() for one in inputs()[:6])
        return q, k, v, g, None, beta, None, torch.tensor([0, 3, 3, 7], device=device)

    def checkpointed() -> tuple[Any, ...]:
        q, k, v, g, _, beta = (None if one is None else one[:1].contiguous() for one in inputs(tokens=70)[:6])
        return q, k, v, g, None, beta, None, torch.tensor([0, 70], device=device)

    def halves() -> tuple[Any, ...]:
        q, k, v, g, _, beta, *_ = inputs(tokens=70)
        q, k, v = (one.repeat(1, 1, 1, 2).to(torch.bfloat16) for one in (q, k, v))
        return q, k, v, g, None, beta, None, None

    scale = torch.tensor(0.3, dtype=torch.float64, device=device)
    pool, snapshots = leaf(5, 6, 20, 24), leaf(2, 9, 6, 20, 24)
    slots = torch.tensor([3, 1], device=device)
    step = inputs()
    return {
        "delta_rule": [
            (*inputs(), 0.3, True, True, False, False),
            (*packed(), 0.3, False, False, False, True),
            (*halves(), 0.3, True, True, False, True),
        ],
        "delta_rule_autograd": [
            (*inputs(True), 0.3, None, True, True, False, True),
            (*packed(), 0.0, scale, True, False, False, False),
        ],
        "delta_rule_backward": [
            (leaf(2, 7, 6, 24), leaf(2, 6, 20, 24), *inputs(), 0.3, None, True, False, True),
            (leaf(1, 7, 6, 24), None, *packed(), 0.0, scale, False, False, False),
        ],
        "delta_rule_checkpoints": [
            (*checkpointed(), leaf(2, 6, 20, 24), slots[:1] - 2, 64, 0.3, None, True, True, False, True),
            (*checkpointed(), leaf(2, 6, 20, 24), slots[:1] - 2, 64, 0.0, scale, False, False, False, False),
        ],
        "delta_rule_step": [
            (
                *step[:3],
                pool,
                step[3],
                None,
                step[5],
                leaf(6),
                None,
                slots,
                None,
                snapshots,
                0.3,
                None,
                -5.0,
                1,
                True,
                False,
                True,
            )
        ],
    }


def output(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None) -> torch.Tensor:
    return delta_rule.chunk_gated_delta_rule(q, k, v, g, beta, scale)[0]


def functions(device: str) -> dict[str, Case]:
    def step(tokens: int, *rows: int) -> dict[str, Any]:
        q, k, v, *_ = arguments(device, 1, batch=tokens).values()
        heads = {name: torch.randn(6, device=device) for name in ("A_log", "dt_bias")}
        raw = {name: torch.randn(tokens, 1, 6, device=device) for name in ("a", "b")}
        return dict(q=q, k=k, v=v, state=torch.randn(tokens, 6, *rows, device=device)) | heads | raw

    def columns_first(**given: Any) -> torch.Tensor:
        return flashinfer.gated_delta_rule_decode_pretranspose(**given)[0]

    def rows_first(**given: Any) -> torch.Tensor:
        return flashinfer.gated_delta_rule_decode(**given)[0]

    def several(tokens: int) -> dict[str, Any]:
        q, k, v, *_ = arguments(device, 4, batch=tokens).values()
        heads = {name: torch.randn(6, device=device) for name in ("A_log", "dt_bias")}
        raw = {name: torch.randn(tokens, 4, 6, device=device) for name in ("a", "b")}
        pool = torch.randn(tokens + 3, 6, 24, 20, device=device)
        slots = torch.arange(tokens, device=device) + 2
        given = dict(q=q, k=k, v=v, initial_state=pool, initial_state_indices=slots, disable_state_update=False)
        return given | heads | raw

    def rows_apart(tokens: int) -> dict[str, Any]:
        q, k, v, _, beta = arguments(device, 3, batch=tokens).values()
        g = -torch.rand(tokens, 3, 6, 20, device=device)
        return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=torch.randn(tokens, 6, 24, 20, device=device))

    def drafts(**given: Any) -> torch.Tensor:
        return flashinfer.gated_delta_rule_mtp(**given)[0]

    def kimi(**given: Any) -> torch.Tensor:
        return flashinfer.recurrent_kda(**given)[0]

    given = ("q", "k", "v", "g", "beta")
    return {
        "chunk_gated_delta_rule": Case(output, lambda n: arguments(device, 9, batch=n), ("scale",), given),
        "gated_delta_rule_decode": Case(rows_first, lambda n: step(n, 20, 24), ("scale",), (), ("state",)),
        "gated_delta_rule_decode_pretranspose": Case(
            columns_first, lambda n: step(n, 24, 20), ("scale",), (), ("state",)
        ),
        "gated_delta_rule_mtp": Case(drafts, several, ("scale",), (), ("initial_state",)),
        "recurrent_kda": Case(kimi, rows_apart, ("scale",), (), ("initial_state",)),
    }


CASES = Cases(operators, functions)
