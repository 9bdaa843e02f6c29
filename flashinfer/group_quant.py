"""Quantisation of activations: numbers of eight bits, and a scale for each group of a token's columns.

Source of the formats: Micikevicius et al.: FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

import math

import torch

from ._ops.declare import define
from ._ops.errors import value_error
from ._ops.numbers import check_option, positive, positive_real
from ._ops.route import without_gradient
from ._ops.tensors import check_dtype, check_tensor
from .jit.modules.group_quant import gen_group_quant_module

__all__ = ["gen_group_quant_module", "per_token_group_quant_8bit"]

_NAME = "per_token_group_quant_8bit"
_DTYPES = (torch.float8_e4m3fn, torch.int8)
BACKENDS = ("auto", "cuda", "cutile")

_quantize = define(
    f"{_NAME}(Tensor x, Tensor(a!) q, Tensor(b!) scale, int group_size, float eps, bool power_of_two) -> ()",
    gen_group_quant_module,
    fallback=without_gradient(_NAME, "x"),
)


def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each group of ``group_size`` adjacent columns of a token, with a scale of its own.

    ``scale = max(amax(group), eps) / largest`` and ``q = x / scale``, with the largest number 448 of float8_e4m3fn
    or 127 of int8. Numbers are rounded to nearest, ties to even. NaN stays NaN, and is 0 in int8.

    Args:
        x: ``[..., n]`` float32, float16 or bfloat16. n is a multiple of ``group_size``. Rows with other strides
            than those of a matrix are copied.
        group_size: columns of a group. Fast sizes are 4, 8, 16 or 32 times 16 bytes.
        eps: least amax of a group, 1e-35 or more.
        dst_dtype: float8_e4m3fn by default, or int8.
        column_major_scales: the scales of a group are contiguous over tokens.
        scale_tma_aligned: with ``column_major_scales``, the stride of groups is a multiple of four.
        scale_ue8m0: round a scale up to a power of two.
        backend: ``"auto"``, ``"cuda"`` or ``"cutile"``: accepted, one kernel serves all.

    Returns:
        ``(q, scale)``: x's shape in ``dst_dtype``, and ``[..., n / group_size]`` float32.

    Raises:
        ValueError: invalid sizes, ``eps`` or backend, or ``scale_tma_aligned`` without ``column_major_scales``.
        TypeError: invalid dtypes.
        GradientError: ``x`` requires a gradient; there is none.
    """
    check_option(_NAME, "backend", backend, BACKENDS)
    check_tensor(_NAME, "x", x)
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    check_dtype(_NAME, "dst_dtype", dtype, _DTYPES)
    positive(_NAME, "group_size", group_size)
    positive_real(_NAME, "eps", eps)
    if x.dim() < 1:
        raise value_error(_NAME, "x", "0 dimensions", "1 or more")
    if scale_tma_aligned and not column_major_scales:
        raise value_error(_NAME, "scale_tma_aligned", True, "False without column_major_scales")
    n = x.shape[-1]
    if n % group_size != 0:
        raise value_error(_NAME, "group_size", group_size, f"a divisor of x's last dimension, {n}")
    tokens, groups = math.prod(x.shape[:-1]), n // group_size
    rows = x.reshape(tokens, n)
    q = torch.empty((tokens, n), dtype=dtype, device=x.device)
    if column_major_scales:
        stride = (tokens + 3) // 4 * 4 if scale_tma_aligned else tokens
        scale = torch.empty((groups, stride), dtype=torch.float32, device=x.device)[:, :tokens].t()
    else:
        scale = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    _quantize(rows, q, scale, group_size, eps, scale_ue8m0)
    return q.view(x.shape), scale.view(*x.shape[:-1], groups)
