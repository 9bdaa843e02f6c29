"""Fused operators of diffusion models.

Source of the layer: Wan Team: Wan: Open and Advanced Large-Scale Video Generative Models, 2025.
"""

from __future__ import annotations

import math

import torch

from ._ops.declare import define
from ._ops.errors import check_dense, value_error
from ._ops.numbers import finite, positive, positive_real, whole
from ._ops.route import without_gradient
from ._ops.tensors import check_tensor
from .jit.modules.diffusion_ops import gen_diffusion_ops_module

__all__ = ["fused_qk_rmsnorm_rope", "gen_diffusion_ops_module"]

_NAME = "fused_qk_rmsnorm_rope"

_norm_rope = define(
    f"{_NAME}(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor(a!) q_out, Tensor(b!) k_out, Tensor(c!) v_out,"
    " int ppf, int pph, int ppw, int num_frame_channels, int num_height_channels, int num_width_channels, float eps,"
    " float base, bool interleave, bool is_qk_norm, float output_quant_scale, float v_quant_scale) -> ()",
    gen_diffusion_ops_module,
    fallback=without_gradient(_NAME, "qkv", "q_weight", "k_weight"),
    needs=lambda *_: {},
)


def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise queries and keys over all heads of a token, rotate them by three axes, and copy values.

    A token of a video has a frame, a row and a column. Pair i of a head rotates by one of them: the first
    ``num_frame_channels / 2`` pairs by the frame, the next by the row, the last by the column. Pair j of an axis
    with c channels has the frequency ``base ** (-2 j / c)``. Results are computed in float32 and rounded once.

    Args:
        qkv: ``[batch, ppf * pph * ppw, n]``, or ``[tokens, n]`` with a multiple of that many tokens. bfloat16, with
            ``n = (num_heads_q + num_heads_k + num_heads_v) * head_dim``.
        q_weight, k_weight: ``[heads * head_dim]`` bfloat16.
        ppf, pph, ppw: frames, rows of a frame and columns of a row.
        num_frame_channels, num_height_channels, num_width_channels: even numbers whose sum is ``head_dim``.
        num_heads_q, num_heads_k, num_heads_v: heads.
        head_dim: 64, 128 or 256.
        eps: added to the mean of the squares.
        base: base of the frequencies.
        interleave: a pair is elements ``(2 i, 2 i + 1)``, otherwise ``(i, i + head_dim / 2)``.
        factor, attention_factor: 1, because other frequencies have no kernel. ``low`` and ``high`` are ignored.
        is_qk_norm: false: rotate only.
        output_fp8: results are float8_e4m3fn.
        output_quant_scale: factor of 8-bit queries and keys.
        v_quant_scale: factor of 8-bit values.
        q_out, k_out, v_out: ``[..., heads, head_dim]``, written. Allocated by default.

    Returns:
        ``(q, k, v)``: ``[batch, tokens, heads, head_dim]``, or ``[tokens, heads, head_dim]``.

    Raises:
        ValueError: invalid shapes, sizes, numbers, strides or devices, or another dtype than bfloat16.
        TypeError: arguments of other types, or outputs of an invalid dtype.
        GradientError: a tensor requires a gradient; there is none.
    """
    check_tensor(_NAME, "qkv", qkv)
    check_dense(_NAME, ("qkv",), (qkv,))
    for name, number in (("factor", factor), ("attention_factor", attention_factor)):
        if number != 1:
            raise value_error(_NAME, name, number, "1")
    if qkv.dtype != torch.bfloat16:  # FlashInfer raises ValueError
        raise value_error(_NAME, "qkv", qkv.dtype, torch.bfloat16)
    grid = [positive(_NAME, name, size) for name, size in (("ppf", ppf), ("pph", pph), ("ppw", ppw))]
    heads = [
        positive(_NAME, name, number)
        for name, number in (("num_heads_q", num_heads_q), ("num_heads_k", num_heads_k), ("num_heads_v", num_heads_v))
    ]
    if qkv.dim() not in (2, 3):
        raise value_error(_NAME, "qkv", f"{qkv.dim()} dimensions", "2 or 3")
    if qkv.dim() == 3 and qkv.shape[1] != math.prod(grid):
        raise value_error(_NAME, "qkv", f"{qkv.shape[1]} tokens", f"ppf * pph * ppw, {math.prod(grid)}")
    shape, dtype = qkv.shape[:-1], torch.float8_e4m3fn if output_fp8 else qkv.dtype
    results = []
    for name, out, number in zip(("q_out", "k_out", "v_out"), (q_out, k_out, v_out), heads, strict=True):
        result = qkv.new_empty((*shape, number, head_dim), dtype=dtype) if out is None else out
        check_tensor(_NAME, name, result)
        if tuple(result.shape) != (*shape, number, head_dim):
            raise value_error(_NAME, name, f"shape {list(result.shape)}", [*shape, number, head_dim])
        if result.dtype != dtype:
            raise value_error(_NAME, name, result.dtype, dtype)
        results.append(result)
    inputs = [qkv, *results]
    if qkv.dim() == 3:
        inputs = [qkv.flatten(0, 1), *(x.view(-1, *x.shape[2:]) for x in results)]
    _norm_rope(
        inputs[0], q_weight, k_weight, *inputs[1:], *grid, whole(_NAME, "num_frame_channels", num_frame_channels),
        whole(_NAME, "num_height_channels", num_height_channels), whole(_NAME, "num_width_channels", num_width_channels),
        finite(_NAME, "eps", eps), positive_real(_NAME, "base", base), interleave, is_qk_norm,
        positive_real(_NAME, "output_quant_scale", output_quant_scale),
        positive_real(_NAME, "v_quant_scale", v_quant_scale),
    )  # fmt: skip
    q, k, v = results
    return q, k, v
