"""Kernels for the delta rule of transformers' hybrid models; see :func:`.transformers.register_delta_rule`.

The models' layers call functions of their own file by name. So the functions are replaced there, and restored
later.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import delta_rule
from .._ops.arguments import check_none
from ..causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from ..gated_norm import gated_rmsnorm

# model_type; its file is models/<model_type>/modeling_<model_type>.py.
MODEL_TYPES = ("kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")

State = torch.Tensor | None


def chunk_gated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    chunk_size: int = 64, initial_state: State = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, State]:  # fmt: skip
    return delta_rule.chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def recurrent(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: State = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, State]:  # fmt: skip
    """Compute the recurrence for decays of heads (``g`` has three dimensions) or of rows (four).

    A decoding step changes its initial state in place, so the cache's copy afterwards copies a tensor to
    itself.
    """
    of_heads, of_rows = (g, None) if g.dim() == 3 else (None, g)
    if query.shape[1] == 1 and initial_state is not None and cu_seqlens is None and not torch.is_grad_enabled():
        out = delta_rule.delta_rule_step(
            query, key, value, initial_state, of_heads, beta, gk=of_rows,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return out, initial_state if output_final_state else None
    return delta_rule.fused_recurrent_gated_delta_rule(
        query, key, value, of_heads, of_rows, beta=beta, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def convolve(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
    seq_idx: torch.Tensor | None = None, cu_seq_lens_q: torch.Tensor | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    if cu_seq_lens_q is None:
        check_none("causal_conv1d_fn", "seq_idx", seq_idx, "packed sequences need cu_seq_lens_q with it")
    out = causal_conv1d_fn(hidden_states, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
    assert isinstance(out, torch.Tensor)
    return out


def convolve_step(
    hidden_states: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    return causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


def gated_norm(module: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Replace the forward method of a model's gated RMSNorm. It rounds only once."""
    dtype = hidden_states.dtype
    weight, eps = module.weight.to(dtype), module.variance_epsilon
    return gated_rmsnorm(hidden_states, gate.to(dtype), weight, eps, activation=module.activation)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_step,
    "chunk_kimi_delta_attention": recurrent,
    "recurrent_kimi_delta_attention": recurrent,
    "torch_chunk_gated_delta_rule": chunk_gated,
    "torch_recurrent_gated_delta_rule": recurrent,
}


def modules_of(model_types: tuple[str, ...]) -> list[ModuleType]:
    """Return the files of models that this version of transformers has."""
    found = []
    for name in model_types:
        try:
            found.append(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))
        except ModuleNotFoundError:
            continue
    return found


def set_functions(modules: list[ModuleType]) -> Callable[[], None]:
    """Replace the functions of the modules, and return a function that restores them."""
    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    for module in modules:
        for name, function in FUNCTIONS.items():
            if name in vars(module):
                replace(module, name, function)
        for name, norm in list(vars(module).items()):
            if name.endswith("RMSNormGated") and isinstance(norm, type):
                replace(norm, "forward", gated_norm)

    def undo() -> None:
        while before:
            owner, name, value = before.pop()
            setattr(owner, name, value)

    return undo
