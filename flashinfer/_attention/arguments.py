"""Checks of arguments that the public functions of attention share, and conversion to the operators' form."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.arguments import check_items, check_none
from .._ops.errors import called
from .._ops.numbers import choice, finite, positive_real, whole
from .._ops.shapes import check_tensors
from .._ops.tensors import check_dims, check_metadata, check_vector
from ..errors import GradientError
from ..utils import get_alibi_slopes
from .operators import number_of_variant
from .signature import Parameters

LAYOUTS = {"NHD": 0, "HND": 1}
POS_ENCODINGS = {"NONE": 0, "ROPE_LLAMA": 1, "ALIBI": 2}
NON_CAUSAL, CAUSAL, CUSTOM, MULTI_ITEM = range(4)  # mask_mode of the operators
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def no_gradient(op: str, tensors: tuple[object, ...], method: str = "") -> None:
    """Raise an error if a tensor requires a gradient, which would otherwise be silently missing."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                name = called(f"{op}{method}")
                raise GradientError(f"{name}: has no gradient, wanted tensors that require none, or torch.no_grad()")


def layout_of(op: str, kv_layout: str) -> int:
    """Return the operators' number of a layout of keys and values."""
    return choice(op, "kv_layout", kv_layout, LAYOUTS)


def caches_of(op: str, paged_kv_cache: PagedCache, kv_layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a paged cache that is one tensor or a pair.

    Tensors of a pair may omit the dimension of the page size if it is 1.
    """
    if isinstance(paged_kv_cache, torch.Tensor):
        check_dims(op, "paged_kv_cache", paged_kv_cache, 5)
        if paged_kv_cache.shape[1] != 2:
            check_tensors(op, paged_kv_cache=(paged_kv_cache, "_ 2 _ _ _"))  # raises; costs 1 us in each call
        return paged_kv_cache.unbind(1)  # type: ignore[return-value]
    check_items(op, "paged_kv_cache", paged_kv_cache, "keys and values", 2)
    k, v = (x.unsqueeze(1 + kv_layout) if isinstance(x, torch.Tensor) and x.dim() == 3 else x for x in paged_kv_cache)
    check_dims(op, "paged_kv_cache[0]", k, 4)
    check_dims(op, "paged_kv_cache[1]", v, 4)
    return k, v


def as_kernel_input(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if kernels cannot read it.

    Its rows must be contiguous. On CUDA they must start at multiples of 16 bytes.
    """
    # A graph cannot trace an address. The operator checks the alignment instead.
    aligned = x.is_cpu or is_compiling() or x.data_ptr() % 16 == 0
    if aligned and x.is_contiguous():
        return x
    if x.is_cpu:
        return x if x.stride(-1) == 1 else x.contiguous()
    if aligned and x.stride(-1) == 1:
        size = x.element_size()
        steps = [stride * size % 16 for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
        if not any(steps):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def check_sinks(op: str, sinks: torch.Tensor, num_qo_heads: int, device: torch.device, custom: bool) -> None:
    """Check ``sinks`` of a run: ``[num_qo_heads]`` float32, contiguous, on the plan's device."""
    if custom:
        check_none(op, "sinks", sinks, "the custom variant of jit_args has its own parameters")
    check_vector(op, "sinks", sinks, torch.float32)
    if sinks.shape != (num_qo_heads,) or sinks.device != device:
        check_metadata(op, "sinks", sinks, (num_qo_heads,), device, torch.float32)


class Logits(NamedTuple):
    """Options that turn a product of a query and a key into a logit."""

    pos_encoding_mode: int
    window_left: int
    logits_soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float


def variant_of(logits: Logits) -> int:
    """Return the number of the builtin variant that computes these logits.

    This is a function, because Dynamo of torch 2.10 evaluates properties of a tuple on proxies.
    """
    return number_of_variant(logits.pos_encoding_mode, logits.logits_soft_cap > 0)


def logits_of(
    op: str,
    head_dim: int,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> Logits:
    """Check the arguments of a call, and fill in their defaults."""
    mode = choice(op, "pos_encoding_mode", pos_encoding_mode, POS_ENCODINGS)
    cap = 0.0 if logits_soft_cap is None else finite(op, "logits_soft_cap", logits_soft_cap)
    factor = max(head_dim, 1) ** -0.5 if sm_scale is None else finite(op, "sm_scale", sm_scale)
    scale = 1.0 if rope_scale is None else positive_real(op, "rope_scale", rope_scale)
    theta = 1e4 if rope_theta is None else positive_real(op, "rope_theta", rope_theta)
    window = window_left if type(window_left) is int else whole(op, "window_left", window_left)
    return Logits(mode, window, cap if cap > 0 else 0.0, factor, scale, theta)


@cache
def _cpu_slopes(num_qo_heads: int) -> torch.Tensor:
    return get_alibi_slopes(num_qo_heads)


def slopes_of(logits: Logits, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    """Return ALiBi's slopes, or ``None`` for other position encodings.

    On CUDA each call computes them on the device. A graph cannot capture a copy from the host, and memory
    that is allocated during capture or warm-up belongs to the graph.
    """
    if logits.pos_encoding_mode != 2:
        return None
    if device.type == "cpu" and not is_dynamo_compiling():
        return _cpu_slopes(num_qo_heads)
    whole = 1
    while 2 * whole <= num_qo_heads:
        whole *= 2
    number = torch.arange(1, num_qo_heads + 1, device=device, dtype=torch.float32)
    return torch.exp2(torch.where(number <= whole, number * 2, (number - whole) * 2 - 1) * (-4 / whole))


def parameters_of(
    logits: Logits, num_qo_heads: int, device: torch.device, factor: float = 1.0, numbers: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Parameters:  # fmt: skip
    """Return the parameters of the builtin variants. ``factor`` multiplies ``sm_scale``."""
    slopes = slopes_of(logits, num_qo_heads, device)
    return Parameters(slopes, numbers, scales, None, logits.sm_scale * factor, logits.logits_soft_cap)
