"""Calls of the quantisation of groups."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.group_quant import per_token_group_quant_8bit

from ..support.cases import Case, Cases


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x = torch.randn(5, 96, device=device)
    outputs = (torch.zeros(5, 96, dtype=torch.int8, device=device), torch.zeros(5, 3, device=device))
    columns = (outputs[0].to(torch.float8_e4m3fn), torch.zeros(12, 8, device=device)[:, :5].t())
    return {
        "per_token_group_quant_8bit": [(x, *outputs, 32, 1e-10, False), (x.bfloat16(), *columns, 8, 1e-3, True)],
    }


def functions(device: str) -> dict[str, Case]:
    def inputs(n: int) -> dict[str, Any]:
        return dict(x=torch.randn(n, 256, device=device), group_size=128)

    return {"per_token_group_quant_8bit": Case(per_token_group_quant_8bit, inputs)}


CASES = Cases(operators, functions)
