"""Normalisation with a gate, the end of layers of Mamba-2, Gated DeltaNet and Kimi."""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.errors import value_error
from ._ops.numbers import check_option
from ._ops.route import Fallback
from ._ops.scalars import scalar
from .gated_norm_backward import gated_rmsnorm_gradient
from .jit.modules.gated_norm import gen_gated_norm_module

__all__ = ["gated_rmsnorm", "gen_gated_norm_module"]

ACTIVATIONS = ("silu", "swish", "sigmoid")
_HOW = "int group_size, bool sigmoid, bool norm_before_gate"


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return input.new_empty(input.shape)


_autograd = define(
    f"gated_rmsnorm_autograd(Tensor input, Tensor gate, Tensor weight, float eps, Tensor? eps_tensor, {_HOW}) -> Tensor",
    gen_gated_norm_module,
    _like_input,
    gradient=gated_rmsnorm_gradient(),
)


def _fallback(input: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *how: Any) -> Any:
    return _autograd(input, gate, weight, *scalar(eps, input.device), *how)


_gated_rmsnorm = define(
    f"gated_rmsnorm(Tensor input, Tensor gate, Tensor weight, float eps, {_HOW}) -> Tensor",
    gen_gated_norm_module,
    _like_input,
    fallback=Fallback(_fallback, ("input", "gate", "weight"), ("eps",)),
)


def gated_rmsnorm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> torch.Tensor:
    """Normalise with a gate: ``rmsnorm(input, weight) * act(gate)``, or gate first.

    Without ``norm_before_gate`` the result is ``rmsnorm(input * act(gate), weight)``.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16; on the CPU also float64, to check
            gradients); any strides of leading dimensions that three dimensions can express.
        gate: same shape and dtype, any strides.
        weight: ``[hidden_size]``, same dtype.
        eps: added to the mean of the squares.
        activation: ``"silu"`` or ``"swish"``, which is the same, as in Qwen3-Next and Mamba-2, or
            ``"sigmoid"``, as in Kimi's layers.
        norm_before_gate: ``False`` gates first and normalises the result, as Mamba-2 does.
        group_size: number of neighbours that are normalised together; a divisor of hidden_size, ``None``:
            all.

    Returns:
        New memory of ``input``'s shape and dtype.

    Raises:
        ValueError: invalid shapes, strides or devices, or another activation.
        TypeError: invalid dtypes.

    Only the result is rounded. There are gradients of input, gate and weight. The gradient of weight is
    summed in a
    fixed order: the same bits in every run on one device.
    """
    check_option("gated_rmsnorm", "activation", activation, ACTIVATIONS)
    if group_size is not None and group_size < 1:
        raise value_error("gated_rmsnorm", "group_size", group_size, "a divisor of the last dimension")
    return _gated_rmsnorm(  # type: ignore[no-any-return]
        input, gate, weight, eps, group_size or 0, activation == "sigmoid", norm_before_gate
    )
