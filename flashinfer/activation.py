"""Gated activations: ``act(gate) * up`` of the two halves of the last dimension.

Every function has a gradient, also with ``out``: autograd treats the write as a ``copy_``. The CPU also takes
float64, to check gradients; its error is at most 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._ops.declare import define
from ._ops.route import Fallback, write
from .activation_backward import act_and_mul_gradient
from .jit.modules.activation import gen_act_and_mul_module

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gen_act_and_mul_module",
    "get_act_and_mul_module",
    "silu_and_mul",
]


def _half_of_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty((*input.shape[:-1], input.shape[-1] // 2), dtype=input.dtype, device=input.device)


def _define(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    module, op = partial(gen_act_and_mul_module, name), f"{name}_and_mul"
    arguments = "Tensor input, bool? enable_pdl"
    autograd = define(
        f"{op}_autograd({arguments}) -> Tensor", module, _half_of_input, gradient=act_and_mul_gradient(name)
    )

    def into(out: torch.Tensor, input: torch.Tensor, enable_pdl: bool | None) -> None:
        write(op, "out", out, autograd(input, enable_pdl))

    return (
        define(f"{op}({arguments}) -> Tensor", module, _half_of_input, fallback=Fallback(autograd, ("input",))),
        define(f"{op}_out(Tensor(a!) out, {arguments}) -> ()", module, fallback=Fallback(into, ("out", "input"))),
    )


_silu, _silu_out = _define("silu")
_gelu_tanh, _gelu_tanh_out = _define("gelu_tanh")
_gelu, _gelu_out = _define("gelu")


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """Apply SwiGLU's gate: ``silu(input[..., :d]) * input[..., d:]`` with ``silu(x) = x / (1 + exp(-x))``.

    Args:
        input: ``[..., 2 * d]`` (float32, float16, bfloat16); any ``d``, any strides of leading dimensions
            that three dimensions can express.
        out: ``[..., d]``, same dtype; may be ``input[..., :d]`` itself. Allocated by default.
        enable_pdl: programmatic dependent launch (compute capability 9.0 and newer); by default if the GPU
            has it.

    Returns:
        ``out``.

    Raises:
        ValueError: an odd last dimension, invalid shapes, strides or devices, or an ``out`` that overlaps
            ``input`` in another way.
        TypeError: invalid dtypes.

    Source: Shazeer: GLU Variants Improve Transformer, 2020. The product is rounded once; no ``x`` overflows.
    """
    if out is None:
        return _silu(input, enable_pdl)  # type: ignore[no-any-return]
    _silu_out(out, input, enable_pdl)
    return out


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Apply a gate with GELU's tanh form: ``out = gelu_tanh(input[..., :d]) * input[..., d:]``.

    ``gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``.

    Args:
        input, out: ``[..., 2 * d]`` and ``[..., d]``. All arguments, the result and errors are as for
            :func:`silu_and_mul`.

    Source: Hendrycks, Gimpel: Gaussian Error Linear Units, 2016.
    """
    if out is None:
        return _gelu_tanh(input, enable_pdl)  # type: ignore[no-any-return]
    _gelu_tanh_out(out, input, enable_pdl)
    return out


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """Apply a gate with exact GELU: ``out = gelu(input[..., :d]) * input[..., d:]``.

    ``gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))``.

    ``erfc`` computes it, so results for negative ``x`` keep their digits.

    Args:
        input, out: ``[..., 2 * d]`` and ``[..., d]``. All arguments, the result and errors are as for
            :func:`silu_and_mul`.

    Source: Hendrycks, Gimpel: Gaussian Error Linear Units, 2016.
    """
    if out is None:
        return _gelu(input, enable_pdl)  # type: ignore[no-any-return]
    _gelu_out(out, input, enable_pdl)
    return out


def get_act_and_mul_module(act_func_name: str, backend: str = "cuda") -> Any:
    """Load the module of one activation function, and build it if necessary.

    Args:
        act_func_name: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        backend: ``"cpu"`` or ``"cuda"``.

    Returns:
        The ``torch.ops`` namespace in which the module has registered its operators.

    Raises:
        ValueError: no such function or backend.
    """
    return gen_act_and_mul_module(act_func_name, backend).build_and_load()
