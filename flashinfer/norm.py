"""Normalisation along the last dimension.

Every function has a gradient, also those that write to ``out`` or in place, which autograd treats as a
``copy_``. So a leaf that requires a gradient cannot be written (an error of torch), and inputs of the
backward pass must not be overwritten later. The CPU also takes float64, to check gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._compat import elsewhere
from ._ops.declare import define
from ._ops.route import Fallback, write
from ._ops.scalars import scalar
from .jit.modules.norm import gen_norm_module
from .norm_backward import fused_add_rmsnorm_gradient, layernorm_gradient, rmsnorm_gradient

__all__ = [
    "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "gen_norm_module",
    "layernorm",
    "rmsnorm",
]

# FlashInfer has these names here too. Their family is imported when they are used.
__getattr__ = elsewhere(
    __name__,
    dict.fromkeys(
        ("fused_add_rmsnorm_fp8_block_quant", "fused_add_rmsnorm_quant", "layernorm_quant", "rmsnorm_quant"),
        "norm_quant",
    ),
)


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def _like_input_and_residual(input: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), residual.new_empty(residual.shape)


def _define_rmsnorm(name: str, weight_offset: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    arguments = "Tensor input, Tensor weight, float eps"
    autograd = define(
        f"{name}_autograd({arguments}, Tensor? eps_tensor, bool? enable_pdl) -> Tensor",
        gen_norm_module,
        _like_input,
        gradient=rmsnorm_gradient(weight_offset),
    )

    def new(input: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool | None) -> Any:
        return autograd(input, weight, *scalar(eps, input.device), enable_pdl)

    def into(out: torch.Tensor, *args: Any) -> None:
        write(name, "out", out, new(*args))

    differentiable = ("input", "weight")
    return (
        define(
            f"{name}({arguments}, bool? enable_pdl) -> Tensor",
            gen_norm_module,
            _like_input,
            fallback=Fallback(new, differentiable, ("eps",)),
        ),
        define(
            f"{name}_out(Tensor(a!) out, {arguments}, bool? enable_pdl) -> ()",
            gen_norm_module,
            fallback=Fallback(into, ("out", *differentiable), ("eps",)),
        ),
    )


def _define_fused_add_rmsnorm(name: str, weight_offset: float) -> Callable[..., Any]:
    autograd = define(
        f"{name}_autograd(Tensor input, Tensor residual, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl)"
        " -> (Tensor, Tensor)",
        gen_norm_module,
        _like_input_and_residual,
        gradient=fused_add_rmsnorm_gradient(weight_offset),
    )

    def in_place(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool | None
    ) -> None:
        normed, total = autograd(input, residual, weight, *scalar(eps, input.device), enable_pdl)
        write(name, "input", input, normed)
        write(name, "residual", residual, total)

    return define(
        f"{name}(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool? enable_pdl) -> ()",
        gen_norm_module,
        fallback=Fallback(in_place, ("input", "residual", "weight"), ("eps",)),
    )


def _define_layernorm() -> tuple[Callable[..., Any], Callable[..., Any]]:
    arguments = "Tensor input, Tensor gemma, Tensor beta, float eps"
    autograd = define(
        f"layernorm_autograd({arguments}, Tensor? eps_tensor) -> Tensor",
        gen_norm_module,
        _like_input,
        gradient=layernorm_gradient(),
    )

    def new(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float) -> Any:
        return autograd(input, gemma, beta, *scalar(eps, input.device))

    def into(out: torch.Tensor, *args: Any) -> None:
        write("layernorm", "out", out, new(*args))

    differentiable = ("input", "gemma", "beta")
    return (
        define(
            f"layernorm({arguments}) -> Tensor",
            gen_norm_module,
            _like_input,
            fallback=Fallback(new, differentiable, ("eps",)),
        ),
        define(
            f"layernorm_out(Tensor(a!) out, {arguments}) -> ()",
            gen_norm_module,
            fallback=Fallback(into, ("out", *differentiable), ("eps",)),
        ),
    )


_rmsnorm, _rmsnorm_out = _define_rmsnorm("rmsnorm", 0.0)
_gemma_rmsnorm, _gemma_rmsnorm_out = _define_rmsnorm("gemma_rmsnorm", 1.0)
_fused_add_rmsnorm = _define_fused_add_rmsnorm("fused_add_rmsnorm", 0.0)
_gemma_fused_add_rmsnorm = _define_fused_add_rmsnorm("gemma_fused_add_rmsnorm", 1.0)
_layernorm, _layernorm_out = _define_layernorm()


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise by the root mean square: ``out = input / sqrt(mean(input ** 2) + eps) * weight``.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); any strides of leading dimensions that
            three dimensions can express.
        weight: ``[hidden_size]``, same dtype.
        eps: added to the mean of the squares.
        out: same shape and dtype as ``input``; may be ``input`` itself. Allocated by default.
        enable_pdl: programmatic dependent launch (compute capability 9.0 and newer); by default if the GPU
            has it.

    Returns:
        ``out``.

    Raises:
        ValueError: invalid shapes, strides or devices, or an ``out`` that partly overlaps an input.
        TypeError: invalid dtypes.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, 2019. Sums are in float32.
    """
    if out is None:
        return _rmsnorm(input, weight, eps, enable_pdl)  # type: ignore[no-any-return]
    _rmsnorm_out(out, input, weight, eps, enable_pdl)
    return out


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Call :func:`rmsnorm` with ``weight + 1``, added in float32, as Gemma does.

    Args:
        input, weight, out: ``[..., hidden_size]``, ``[hidden_size]`` and ``[..., hidden_size]``. All
            arguments, the result and errors are as for :func:`rmsnorm`.
    """
    if out is None:
        return _gemma_rmsnorm(input, weight, eps, enable_pdl)  # type: ignore[no-any-return]
    _gemma_rmsnorm_out(out, input, weight, eps, enable_pdl)
    return out


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add and normalise in place: ``residual += input``, then ``input = rmsnorm(residual, weight)``.

    The sum is normalised in float32; ``residual`` receives it rounded to its dtype.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16), overwritten with the normalised sum.
        residual: same shape and dtype, overwritten with the sum.
        weight: ``[hidden_size]``, same dtype.
        eps, enable_pdl: as for :func:`rmsnorm`.

    Raises:
        ValueError: invalid shapes, strides or devices, or arguments that overlap.
        TypeError: invalid dtypes.

    In training, no earlier function may need ``residual`` for its gradient, as :func:`rmsnorm` needs its
    input. Pass ``residual.clone()`` then, or write ``residual = residual + input`` and :func:`rmsnorm`.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Call :func:`fused_add_rmsnorm` with ``weight + 1``, as :func:`gemma_rmsnorm` does.

    Args:
        input, residual: ``[..., hidden_size]``, both overwritten.
        weight: ``[hidden_size]``.
        eps, enable_pdl: as for :func:`rmsnorm`; errors are those of :func:`fused_add_rmsnorm`.
    """
    _gemma_fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


def layernorm(
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise by mean and variance: ``out = (input - mean) / sqrt(var + eps) * gemma + beta``.

    Args:
        input: ``[..., hidden_size]`` (float32, float16, bfloat16); any strides of leading dimensions that
            three dimensions can express.
        gemma, beta: ``[hidden_size]``, both float32 or both of ``input``'s dtype.
        eps: added to the (biased) variance.
        out: same shape and dtype as ``input``; may be ``input`` itself. Allocated by default.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError: as :func:`rmsnorm`.

    Source: Ba, Kiros, Hinton: Layer Normalization, 2016. Mean and variance are in float32, the variance from
    deviations.
    """
    if out is None:
        return _layernorm(input, gemma, beta, eps)  # type: ignore[no-any-return]
    _layernorm_out(out, input, gemma, beta, eps)
    return out
