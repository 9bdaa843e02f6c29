"""Enumerations of experts and routing: the names of :mod:`flashinfer.tllm_enums`."""

from __future__ import annotations

from .._ops.codes import Code

__all__ = [
    "DEFAULT_SITU_BETA",
    "DEFAULT_SITU_LINEAR_BETA",
    "DEFAULT_SWIGLU_ALPHA",
    "DEFAULT_SWIGLU_BETA",
    "DEFAULT_SWIGLU_LIMIT",
    "ActivationType",
    "RoutingMethodType",
    "is_gated_activation",
]

DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = 2.0**128 - 2.0**104  # the largest float32
DEFAULT_SITU_BETA = 4.0
DEFAULT_SITU_LINEAR_BETA = 25.0


class ActivationType(Code):
    """Activation between an expert's two products.

    A gated one reads two rows of the first weight for each column.
    """

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3  # silu(gate) * up
    Geglu = 4  # gelu(gate) * up
    SwigluBias = 5
    Relu2 = 6  # relu(x) ** 2
    SwigluStep = 7  # min(silu(gate), limit) * clamp(up, -limit, limit)
    GegluTanh = 8
    Identity = 9
    Situ = 10  # beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)
    InvalidType = 11
    ClampedRelu2 = 12  # no kernel

    @property
    def is_gated(self) -> bool:
        """Return whether the activation multiplies a gate with a linear half."""
        return self.value in _GATED


_GATED = frozenset({3, 4, 5, 7, 8, 10})


def is_gated_activation(activation_type: ActivationType | int) -> bool:
    """Return :attr:`ActivationType.is_gated` of a member or its number.

    Raises:
        ValueError: no member has this number.
    """
    return ActivationType(activation_type).is_gated


class RoutingMethodType(Code):
    """Rules that turn scores into experts and weights."""

    Default = 0  # softmax, then top k
    Renormalize = 1  # top k, then softmax over them
    DeepSeekV3 = 2  # sigmoid, top k of it and a bias in the best groups, renormalised
    Llama4 = 3  # top k, then sigmoid
    RenormalizeNaive = 4  # softmax, top k, renormalised
    TopK = 5  # top k, weights are the logits
    SigmoidRenorm = 6  # sigmoid, top k, renormalised
    MiniMax2 = 7  # sigmoid, top k of it and a bias, renormalised
    Sigmoid = 8  # sigmoid, then top k
    TopKSigmoid = 9  # top k, then sigmoid, as Llama4
    Unspecified = 10  # no rule
