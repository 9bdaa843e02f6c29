"""Mixtures of experts of transformers with stacked weights: a function of its ``ExpertsInterface``."""

from __future__ import annotations

from typing import Any

import torch

from ..fused_moe.layer import Gate, run_experts
from ..tllm_enums import ActivationType

EXPERTS = "fi_experts"
# Classes of activations -> the activation without a gate, and with one.
_ACTIVATIONS = {
    "SiLUActivation": (ActivationType.Silu, ActivationType.Swiglu),
    "SiLU": (ActivationType.Silu, ActivationType.Swiglu),
    "GELUActivation": (ActivationType.Gelu, ActivationType.Geglu),
    "GELUTanh": (None, ActivationType.GegluTanh),
    "ReLU": (ActivationType.Relu, None),
    "ReLUSquaredActivation": (ActivationType.Relu2, None),
}


def _error(text: str) -> ValueError:
    return ValueError(f"{EXPERTS}: {text}; use another experts_implementation")


def _gate(module: Any) -> Gate:
    """Return the activation between the products of a module's experts.

    Raises:
        ValueError: no kernel has it.
    """
    if module.has_gate and type(module)._apply_gate.__module__ != "transformers.integrations.moe":
        raise _error(f"got {type(module).__name__} with its own gate, wanted act(gate) * up")
    if module.has_gate and not getattr(module, "is_concatenated", True):
        raise _error("got interleaved gate and up, wanted one after the other")
    if getattr(module, "has_post_expert_norm", False):  # older releases of transformers have no such norm
        raise _error("got a norm after each expert, wanted none")
    name = type(module.act_fn).__name__
    activation = _ACTIVATIONS.get(name, (None, None))[1 if module.has_gate else 0]
    if activation is None:
        raise _error(f"act_fn: got {name}, wanted one of {', '.join(_ACTIVATIONS)}")
    return Gate(int(activation), gate_first=True)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a module of transformers.

    Args:
        module: ``gate_up_proj [E, 2 I, H]``, with the gate's rows first, or without a gate
            ``up_proj [E, I, H]``, and ``down_proj [E, H, I]``. With ``is_transposed`` the last two dimensions
            are exchanged. Both may have biases.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]``; invalid ids add nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]``.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    first, second = getattr(module, name), module.down_proj
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    biases = [getattr(module, f"{one}_bias").float() if module.has_bias else None for one in (name, "down_proj")]
    out = torch.empty_like(hidden_states)
    run_experts(
        out, hidden_states, top_k_index.contiguous(), top_k_weights.float().contiguous(), first, second, _gate(module),
        biases=(biases[0], biases[1]),
    )  # fmt: skip
    return out
