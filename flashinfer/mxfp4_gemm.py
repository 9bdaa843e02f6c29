"""Weights of experts in MXFP4: codes of 4 bits (e2m1), and one scale of 8 bits (e8m0) for each 32 elements of a row.

The plain form of a matrix ``[N, K]`` has codes uint8 ``[N, K / 2]`` and scales uint8 ``[N, K / 32]``. The low half of a
byte is the code of the element with the even index. An element is the value of its code times ``2 ** (scale - 127)``.
Kernels read the interleaved form.
"""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.dtypes import FLOATS
from ._ops.errors import value_error
from ._ops.route import without_gradient
from ._ops.shapes import check_tensors
from ._ops.tensors import check_dims, check_dtype, check_tensor
from .errors import UnsupportedError
from .jit.modules.mxfp4_gemm import gen_mxfp4_gemm_module

__all__ = [
    "dequantize_mxfp4",
    "gen_mxfp4_gemm_module",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "quantize_mxfp4",
]

GROUP = 32  # elements that share a scale
DEPTH, ROWS = 128, 64  # K must be a multiple of DEPTH, N of ROWS
_BYTES = (torch.uint8,)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

mxfp4_gemm = define(
    "mxfp4_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor b_scale, Tensor m_indptr, Tensor? a_rows) -> ()",
    gen_mxfp4_gemm_module,
    fallback=without_gradient("mxfp4_gemm", "a"),
    needs=lambda *_: {},
)
# out[r] = a[a_rows[r]] @ b[e]^T for each row r of m_indptr[e] to m_indptr[e + 1], with b and b_scale interleaved.


def _check_multiple(function: str, argument: str, got: int, unit: str, divisor: int) -> None:
    if got % divisor != 0:
        raise value_error(function, argument, f"{got} {unit}", f"a multiple of {divisor}")


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a weight, as OCP's specification of MX formats defines them.

    The exponent of a scale is that of the largest magnitude of its 32 elements, minus 2. Elements are rounded to the
    nearest code, ties to even mantissas. Magnitudes above ``6 * scale`` become ``6 * scale``. Scales of groups with NaN
    or infinity are NaN.

    Args:
        weight: ``[..., K]``, float32, float16 or bfloat16. K is a multiple of 32.

    Returns:
        Codes uint8 ``[..., K / 2]`` and scales uint8 ``[..., K / 32]``.

    Raises:
        ValueError: K is not a multiple of 32.
        TypeError: another dtype.
    """
    name = "quantize_mxfp4"
    check_tensor(name, "weight", weight)
    check_dtype(name, "weight", weight.dtype, FLOATS)
    _check_multiple(name, "weight", weight.shape[-1] if weight.dim() else 1, "elements in a row", GROUP)
    groups = weight.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-127, 127)
    size = groups.abs() * _powers(127 - exponent)
    # Steps of codes: 0.5 below 2, 1 below 4, then 2. A tie goes to the even one of two codes.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = ((size / step).round() * step).clamp(max=6)
    bounds = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=weight.device)
    codes = torch.searchsorted(bounds, size.contiguous()).clamp(max=7) + 8 * groups.signbit()
    codes = codes.to(torch.uint8).flatten(-2)
    scales = torch.where(largest.isfinite(), torch.where(largest == 0, 0, exponent + 127), 255)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales[..., 0].to(torch.uint8)


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight of plain codes and scales, exact in float32 and float64.

    Args:
        codes: ``[..., K / 2]`` uint8.
        scales: ``[..., K / 32]`` uint8. 255 is NaN.

    Returns:
        ``[..., K]`` in ``dtype``.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: another dtype.
    """
    name = "dequantize_mxfp4"
    check_tensor(name, "codes", codes)
    check_dtype(name, "codes", codes.dtype, _BYTES)
    _check_multiple(name, "codes", codes.shape[-1] if codes.dim() else 1, "bytes in a row", GROUP // 2)
    check_tensors(
        name, codes=(codes, None), scales=(scales, (*codes.shape[:-1], codes.shape[-1] // (GROUP // 2)), _BYTES)
    )
    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], dtype=torch.float64, device=codes.device)
    numbers = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()].unflatten(-1, (-1, GROUP))
    weight: torch.Tensor = (numbers * _powers(scales).unsqueeze(-1)).flatten(-2)
    return weight.to(dtype)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (scales - 127)`` as float64, and NaN for 255. It is made of bits: a power function may round."""
    bits = torch.where(scales == 0, 1 << 22, torch.where(scales == 255, 0x7FC00000, scales.int() << 23))
    powers: torch.Tensor = bits.to(torch.int32).view(torch.float32)
    return powers.double()


def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """Return the codes of experts' weights in the form that the kernels of every device read.

    :func:`flashinfer.fused_moe.cutlass_fused_moe` takes this form.
    Each 4 bytes have the same 8 elements as before, with the bits in the order of
    ``include/flashinfer/common/mxfp4_gemm.h``.

    Args:
        weight: ``[E, N, K / 2]`` uint8, plain codes. K is a multiple of 128.
        quant_type: ``"fp4"``.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: another shape.
        TypeError: another dtype.
        UnsupportedError: ``quant_type`` is not ``"fp4"``.
    """
    name = "interleave_moe_weights_for_sm90_mixed_gemm"
    if quant_type != "fp4":
        raise UnsupportedError(f"{name}: quant_type: got {quant_type!r}, has no kernel here; use 'fp4'")
    check_tensors(name, weight=(weight, "e n k", _BYTES))
    _check_multiple(name, "weight", weight.shape[2], "bytes in a row", DEPTH // 2)
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for plain, interleaved in zip(weight, result, strict=True):  # one expert at a time needs little memory
        interleaved.copy_(_interleaved(plain))
    return result


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    words = codes.contiguous().view(torch.int32)
    result = torch.zeros_like(words)
    for half in (0, 1):  # elements 0, 2, 4, 6 are in the low half of a word, the others in the high half
        for place, sign, magnitude in ((0, 15, 6), (1, 12, 3), (2, 9, 0)):
            code = words >> 4 * (2 * place + half) & 15
            result |= (code >> 3) << sign + 16 * half | (code & 7) << magnitude + 16 * half
        code = words >> 4 * (6 + half) & 15
        result |= (code >> 2) << 13 + 16 * half | (code & 3) << 10 + 16 * half
    interleaved: torch.Tensor = result.view(torch.uint8)
    return interleaved


def interleave_moe_scales_for_sm90_mixed_gemm(scales: torch.Tensor, group_size: int = GROUP) -> torch.Tensor:
    """Return the scales of experts' weights in the form that the kernels of every device read.

    :func:`flashinfer.fused_moe.cutlass_fused_moe` takes this form.
    The 256 bytes of a block are the scales of 64 rows, 4 of each.

    Args:
        scales: ``[E, N, K / 32]`` uint8. N is a multiple of 64, and K of 128.
        group_size: 32.

    Returns:
        A new tensor, ``[E, N / 64, K / 128, 16, 16]``.

    Raises:
        ValueError: another shape.
        TypeError: another dtype.
        UnsupportedError: ``group_size`` is not 32.
    """
    name = "interleave_moe_scales_for_sm90_mixed_gemm"
    if group_size != GROUP:
        raise UnsupportedError(f"{name}: group_size: got {group_size!r}, has no kernel here; use {GROUP}")
    check_tensors(name, scales=(scales, "e n k", _BYTES))
    _check_multiple(name, "scales", scales.shape[1], "rows", ROWS)
    _check_multiple(name, "scales", scales.shape[2], "scales in a row", DEPTH // GROUP)
    blocks = scales.unflatten(2, (-1, DEPTH // GROUP)).unflatten(1, (-1, ROWS)).transpose(2, 3)
    result = torch.empty(blocks.shape, dtype=torch.uint8, device=scales.device).copy_(blocks)
    return result.view(*blocks.shape[:3], 16, 16)


def interleaved_scales(op: str, argument: str, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Check scales against their weight and return them as bytes. Engines also pass them as words of 32 bits."""
    check_dims(op, argument, scales, 5)
    check_dtype(op, argument, scales.dtype, (torch.uint8, torch.int32))
    experts, rows, row_bytes = weight.shape
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.uint8)
    check_tensors(
        op, fc1_expert_weights=(weight, None), **{argument: (scales, (experts, rows // ROWS, row_bytes // 64, 16, 16))}
    )
    return scales.contiguous()
