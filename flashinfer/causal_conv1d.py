"""Causal depthwise convolutions along sequences: the short convolution of Mamba, DeltaNet and related models.

Functions have the names and arguments of the package causal_conv1d. The CPU also takes float64, to check
gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ._ops.declare import define
from ._ops.errors import either, value_error
from ._ops.numbers import check_option
from ._ops.route import Fallback, without_gradient, write
from ._ops.tensors import check_tensor
from .causal_conv1d_backward import INPUTS, causal_conv1d_gradient, new_conv_states
from .jit.modules.causal_conv1d import gen_causal_conv1d_module

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "gen_causal_conv1d_module"]

ACTIVATIONS = (None, "silu", "swish")


def _outputs(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, initial_states: Any, cu_seqlens: torch.Tensor | None,
    final_states: bool, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return x.new_empty(x.shape), new_conv_states(x, weight, cu_seqlens, final_states)


_autograd = define(
    f"causal_conv1d_autograd({INPUTS}, bool final_states, bool silu) -> (Tensor, Tensor)",
    gen_causal_conv1d_module,
    _outputs,
    gradient=causal_conv1d_gradient(),
)
_forward = define(
    f"causal_conv1d({INPUTS}, bool final_states, bool silu) -> (Tensor, Tensor)",
    gen_causal_conv1d_module,
    _outputs,
    fallback=Fallback(_autograd, ("x", "weight", "bias", "initial_states")),
)
_update = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens,"
    " Tensor? conv_state_indices, int pad_slot_id, bool silu) -> Tensor",
    gen_causal_conv1d_module,
    lambda x, *_: x.new_empty(x.shape),
    fallback=without_gradient("causal_conv1d_update", "x", "conv_state", "weight", "bias"),
)


def _checked(function: str, activation: str | None, ranks: tuple[int, ...], **tensors: torch.Tensor) -> bool:
    """Return whether there is an activation. ``ranks`` are valid for the first tensor."""
    for name, tensor in tensors.items():
        check_tensor(function, name, tensor)
        if ranks and tensor.dim() not in ranks:
            raise value_error(function, name, f"{tensor.dim()} dimensions", either(ranks))
        ranks = ()
    check_option(function, "activation", activation, ACTIVATIONS)
    return activation is not None


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel: ``out[t] = act(bias + sum_j weight[j] x[t - (width - 1) + j])``.

    Args:
        x: ``[B, channels, T]`` (float32, float16, bfloat16), of any strides. A view of ``[B, T, channels]``
            is read in place; other layouts are copied first.
        weight: ``[channels, width]``, width 2 to 4, of x's dtype or float32.
        bias: ``[channels]``, of weight's dtype.
        initial_states: ``[N, channels, width - 1]`` of x's dtype, the times before each sequence; ``None``:
            zeros.
        return_final_states: also return the last ``width - 1`` times of each sequence.
        final_states_out: receives them and is returned for them.
        activation: ``None``, ``"silu"`` or ``"swish"``, which is the same.
        cu_seqlens: ``[N + 1]``, int32 or int64, offsets of sequences that are packed in one batch; lengths of
            0 are allowed. Without it each batch is a sequence. On CUDA the host does not read its values.

    Returns:
        ``[B, channels, T]``, a view of new memory with contiguous channels. With ``return_final_states`` a
        pair of it and the states, ``[N, channels, width - 1]``.

    Raises:
        ValueError: invalid shapes or devices, or another activation.
        TypeError: invalid dtypes.

    There are gradients of x, weight, bias and initial_states. Sums are in float32. The gradient of a weight
    is summed in
    a fixed order: the same bits in every run on one device. ``cu_seqlens`` separates packed sequences; the
    package causal_conv1d has ``seq_idx`` for it.
    """
    name = "causal_conv1d_fn"
    silu = _checked(name, activation, (3,), x=x, weight=weight)
    final = return_final_states or final_states_out is not None
    out, states = _forward(x.transpose(1, 2), weight.contiguous(), bias, initial_states, cu_seqlens, final, silu)
    if final_states_out is not None:
        write(name, "final_states_out", final_states_out, states)
        states = final_states_out
    out = out.transpose(1, 2)
    return (out, states) if return_final_states else out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> torch.Tensor:
    """Convolve one token of each sequence, or a few, and update a pool of states in place (decoding).

    Args:
        x: ``[B, channels]`` or ``[B, channels, T]`` (float32, float16, bfloat16), of any strides.
        conv_state: ``[slots, channels, length]`` of x's dtype and of any strides, length at least
            ``width - 1``: the last times of each sequence. x is appended to them.
        weight, bias, activation: as in :func:`causal_conv1d_fn`.
        cache_seqlens: ``[B]``, int32 or int64: a state is a ring, and x is written from this time modulo
            length on.
        conv_state_indices: ``[B]``, int32 or int64, the slot of each sequence; ``None``: slot b.
        pad_slot_id: a slot for padding. With it, or with an invalid slot, the result is 0 and no state
            changes.

    Returns:
        New memory of x's shape.

    Raises:
        ValueError: invalid shapes or devices, or another activation.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient.
    """
    name = "causal_conv1d_update"
    silu = _checked(name, activation, (2, 3), x=x, conv_state=conv_state, weight=weight)
    tokens = x if x.dim() == 3 else x.unsqueeze(-1)
    out = _update(
        tokens, conv_state, weight.contiguous(), bias, cache_seqlens, conv_state_indices, pad_slot_id, silu
    )  # fmt: skip
    return out if x.dim() == 3 else out.squeeze(-1)  # type: ignore[no-any-return]
