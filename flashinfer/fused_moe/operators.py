"""Operators of mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.declare import define
from .._ops.route import without_gradient
from ..jit.modules.fused_moe import gen_fused_moe_module
from ..tllm_enums import ActivationType


def _sorted(ids: torch.Tensor, num_experts: int, first_expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def integers(*shape: Any) -> torch.Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    return integers(num_experts + 1), integers(ids.shape[0] * ids.shape[1]), integers(*ids.shape)


def _activated(
    input: torch.Tensor, m_indptr: Any, activation: int, gate_first: bool, bias: Any, alpha: Any, beta: Any, limit: Any,
    quant_scale: torch.Tensor | None, blocks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, width = input.shape
    size = width // 2 if activation in GATED else width
    dtype = torch.float8_e4m3fn if blocks or quant_scale is not None else input.dtype
    scales = input.new_empty((rows if blocks else 0, (size + 127) // 128), dtype=torch.float32)
    return input.new_empty((rows, size), dtype=dtype), scales


GATED = frozenset(int(act) for act in ActivationType if act.is_gated)

route = define(
    "moe_route(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, int method, int n_group, int topk_group,"
    " float routed_scaling_factor) -> ()",
    gen_fused_moe_module,
    fallback=without_gradient("moe_route", "weights", "logits", "bias"),
    needs=lambda spec, weights, ids, logits, *_: {"dtype": (str(logits.dtype).removeprefix("torch."),)},
)
sort = define(
    "moe_sort(Tensor ids, SymInt num_experts, SymInt first_expert) -> (Tensor, Tensor, Tensor)",
    gen_fused_moe_module,
    _sorted,
)
activate = define(
    "moe_activate(Tensor input, Tensor? m_indptr, int activation, bool gate_first, Tensor? bias, Tensor? swiglu_alpha,"
    " Tensor? swiglu_beta, Tensor? swiglu_limit, Tensor? quant_scale, bool blocks) -> (Tensor, Tensor)",
    gen_fused_moe_module,
    _activated,
    fallback=without_gradient("moe_activate", "input"),
)
finalize = define(
    "moe_finalize(Tensor(a!) out, Tensor input, Tensor rows, Tensor? weights, Tensor? bias, Tensor? m_indptr) -> ()",
    gen_fused_moe_module,
    fallback=without_gradient("moe_finalize", "out", "input", "weights"),
    needs=lambda spec, out, input, *_: {"dtype": (str(input.dtype).removeprefix("torch."),)},
)
