"""Matrix products of groups of rows, each group with its own matrix: LoRA, experts, batches, scaled fp8.

Group sizes stay on the device; the host never reads them. Sums are float32. A row's result does not depend on
other rows. Sources: Micikevicius et al., FP8 Formats for Deep Learning, 2022; DeepSeek-V3 Technical Report,
2024, section 3.3 (block scales).
"""

from __future__ import annotations

import torch

from ._compat.backends import serves_backends
from ._gemm.arguments import (
    BLOCK,
    F32,
    OUTPUTS,
    blocks,
    group_ranges,
    in_eight_bits,
    matrices,
    one_number,
    output,
    rows,
)
from ._gemm.groupwise import Granularity, Groups, check_mode, checked_granularity, groupwise
from ._gemm.operators import grouped_gemm
from ._gemm.segment import SegmentGEMMWrapper
from ._ops.dtypes import FP8
from ._ops.errors import value_error
from ._ops.indices import index_table
from ._ops.numbers import check_range
from ._ops.shapes import check_tensors
from ._ops.tensors import check_dtype
from .errors import GradientError
from .jit.frozen import refuse_capture
from .jit.modules.gemm import gen_gemm_module, gen_gemm_sm90_module, gen_gemm_sm100_module

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "bmm_bf16",
    "bmm_fp8",
    "fp8_blockscale_gemm_sm90",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "gen_gemm_module",
    "gen_gemm_sm90_module",
    "gen_gemm_sm100_module",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise_contiguous",
    "mm_bf16",
    "pad_indptr_to_multiple_of_4",
]

_LAYER_NAMES = {"a": "input", "b": "weight", "a_scale": "input_scale", "b_scale": "weight_scale"}
INDICES = (torch.int32, torch.int64)
_UPPER_CASE = {"a": "A", "b": "B", "a_scale": "A_scale", "b_scale": "B_scale"}


@serves_backends("cublas", "cudnn")
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply batches of fp8 matrices: ``out[i] = (A[i] @ B[i]) * A_scale * B_scale``.

    Args:
        A: ``[b, m, k]``, float8_e4m3fn or float8_e5m2.
        B: ``[b, k, n]``, float8_e4m3fn or float8_e5m2. A column-major ``B`` (``[b, n, k]`` transposed) is not
            copied.
        A_scale, B_scale: one float32 number each, on the device of ``A``: factors of the quantised numbers.
        dtype: bfloat16, float16 or float32, of the result.
        out: ``[b, m, n]``, written.
        backend: accepted for FlashInfer's callers. The device selects the kernels.

    Returns:
        ``[b, m, n]``.

    Raises:
        ValueError: invalid shapes or devices.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    name = "bmm_fp8"
    batch, m, _, n = check_tensors(
        name, A=(A, "b m k", FP8), B=(B, "b k n", FP8), A_scale=(A_scale, None, F32), B_scale=(B_scale, None, F32),
        out=(out, "?b m n"),
    )  # fmt: skip
    check_dtype(name, "dtype", dtype, OUTPUTS)
    b = B.transpose(1, 2)
    a_scale, b_scale = one_number(name, "A_scale", A_scale), one_number(name, "B_scale", B_scale)
    result = output(name, out, A, (batch, m, n), dtype)
    grouped_gemm(
        result, rows(A), matrices(b), a_scale, b_scale, None, None, None, None, None, 0, 0, 0,
        names=_UPPER_CASE,
    )  # fmt: skip
    return result


@serves_backends("cublaslt", "cudnn", "tinygemm")
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply two matrices: ``a @ b + bias``.

    Args:
        a: ``[m, k]``: bfloat16, float16 or float32.
        b: ``[k, n]``, same dtype, row-major or column-major.
        bias: ``[n]``, bfloat16, float16 or float32, added in the result's dtype.
        out: ``[m, n]``, written.
        out_dtype: dtype of the result and of ``out``.
        pdl, backend: accepted for FlashInfer's callers.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`bmm_fp8`.
    """
    name = "mm_bf16"
    m, _, n = check_tensors(
        name, a=(a, "m k", OUTPUTS), b=(b, "k n", "a"), bias=(bias, "?n", OUTPUTS), out=(out, "?m n")
    )  # fmt: skip
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        raise GradientError(f"{name}: bias: has no gradient, wanted one that requires none, or torch.no_grad()")
    result = output(name, out, a, (m, n), out_dtype)
    grouped_gemm(
        result, rows(a), matrices(b.t().unsqueeze(0)), None, None, None, None, None, None, None, 0, 0, 0,
    )  # fmt: skip
    return result if bias is None else result.add_(bias)


@serves_backends("cudnn")
def bmm_bf16(
    A: torch.Tensor, B: torch.Tensor, out: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Multiply batches of matrices: ``out[i] = A[i] @ B[i]``.

    Args:
        A: ``[b, m, k]``: bfloat16, float16 or float32.
        B: ``[b, k, n]``, same dtype, row-major or column-major.
        out: ``[b, m, n]``, written.
        out_dtype: dtype of the result and of ``out``.
        backend: accepted for FlashInfer's callers.

    Returns:
        ``[b, m, n]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`bmm_fp8`.
    """
    name = "bmm_bf16"
    batch, m, _, n = check_tensors(name, A=(A, "b m k", OUTPUTS), B=(B, "b k n", "A"), out=(out, "?b m n"))
    result = output(name, out, A, (batch, m, n), out_dtype)
    grouped_gemm(
        result, rows(A), matrices(B.transpose(1, 2)), None, None, None, None, None, None, None, 0, 0, 0,
        names=_UPPER_CASE,
    )  # fmt: skip
    return result


def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply fp8 matrices with block scales: ``(a * a_scale) @ (b * b_scale).T``.

    Args:
        a: ``[m, k]``, float8_e4m3fn or float8_e5m2, any number of rows.
        b: ``[n, k]``, float8_e4m3fn or float8_e5m2.
        a_scale: float32; ``[m / gm, k / gk]`` if ``scale_major_mode`` is ``"K"``, ``[k / gk, m / gm]`` if it
            is ``"MN"``. Sizes are rounded up.
        b_scale: float32, the same of n and k.
        scale_granularity_mnk: ``(gm, gn, gk)``, the numbers along each dimension that share a scale.
        mma_sm: 1 or 2, accepted for FlashInfer's callers.
        out: ``[m, n]``, written.
        out_dtype: dtype of the result; by default that of ``out``, or bfloat16.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError: an invalid rank, shape, device, mode or granularity.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    name = "gemm_fp8_nt_groupwise"
    check_mode(name, scale_major_mode, mma_sm)
    m, _, n = check_tensors(name, a=(a, "m k", FP8), b=(b, "n k", FP8), out=(out, "?m n"))
    granularity = checked_granularity(name, scale_granularity_mnk)
    result = output(name, out, a, (m, n), out_dtype)
    groupwise(name, result, a, b, a_scale, b_scale, granularity, mode=scale_major_mode)
    return result


def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Call :func:`gemm_fp8_nt_groupwise` with blocks of 128 x 128 in both matrices.

    Args:
        a: ``[m, k]``; b: ``[n, k]``.
        a_scale: float32 ``[m / 128, k / 128]`` if ``scale_major_mode`` is ``"K"``, ``[k / 128, m / 128]`` if
            it is ``"MN"``; b_scale: the same of n and k. Sizes are rounded up.
        others: as in :func:`gemm_fp8_nt_groupwise`, also the result and errors.
    """
    return gemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, scale_major_mode, mma_sm, (BLOCK, BLOCK, BLOCK), out, out_dtype
    )


def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Call :func:`gemm_fp8_nt_groupwise` for each group of rows with its own matrix.

    Args:
        a: ``[m, k]``, rows of all groups one after the other, any number of each.
        b: ``[e, n, k]``, a matrix for each group.
        a_scale: as for :func:`gemm_fp8_nt_groupwise`, of all rows; ``gm`` counts from the first row of ``a``.
        b_scale: ``[e, ...]``, for each matrix as for :func:`gemm_fp8_nt_groupwise`.
        m_indptr: ``[e + 1]``, int32 or int64 on the device: group i has the rows ``m_indptr[i]`` to
            ``m_indptr[i + 1]``.
            On CUDA the table is not checked: groups end at the last row of ``a``, and a negative range is empty.
            A row in two groups has the product of either.
        scale_granularity_mnk, scale_major_mode, mma_sm, out_dtype: as for :func:`gemm_fp8_nt_groupwise`.
        out: ``[m, n]``. Only rows of groups are written; a new one has zeros in the others.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`gemm_fp8_nt_groupwise`.
    """
    name = "group_gemm_fp8_nt_groupwise"
    check_mode(name, scale_major_mode, mma_sm)
    m, _, _, n = check_tensors(
        name, a=(a, "m k", FP8), b=(b, "e n k", FP8), m_indptr=(m_indptr, "e+1"), out=(out, "?m n")
    )  # fmt: skip
    granularity = checked_granularity(name, scale_granularity_mnk)
    result = output(name, out, a, (m, n), out_dtype, zeros=True)
    groupwise(name, result, a, b, a_scale, b_scale, granularity, Groups(m_indptr), scale_major_mode)
    return result


def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: Granularity | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply each row with its group's matrix: ``out[i] = (a[i] * a_scale[i]) @ (b[g] * b_scale[g]).T``.

    Args:
        a: ``[m, k]``, float8_e4m3fn or float8_e5m2; rows of one group are neighbours.
        b: ``[e, n, k]``.
        a_scale: float32 ``[m / gm, k / gk]``; b_scale: float32 ``[e, n / gn, k / gk]``.
        m_indices: int32 or int64 ``[m]``, ``g`` of each row; a negative one means no group. On CUDA no index
            is an
            error: too large ones mean no group. If a group's rows lie apart, its rows count from its first
                on.
        scale_granularity_mnk: ``(1, 128, 128)`` by default.
        out: ``[m, n]``. Only rows of groups are written; a new one has zeros in the others.
        out_dtype: dtype of the result; by default that of ``out``, or bfloat16.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`gemm_fp8_nt_groupwise`.
    """
    name = "group_deepgemm_fp8_nt_groupwise"
    return _with_row_indices(name, a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype)


def group_gemm_fp8_nt_groupwise_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: Granularity | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Call :func:`group_deepgemm_fp8_nt_groupwise` under its newer name.

    Arguments, results and errors are the same.
    """
    name = "group_gemm_fp8_nt_groupwise_contiguous"
    return _with_row_indices(name, a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype)


def _with_row_indices(
    name: str, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, m_indices: torch.Tensor,
    scale_granularity_mnk: Granularity | None, out: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    m, _, experts, n = check_tensors(
        name, a=(a, "m k", FP8), b=(b, "e n k", FP8), m_indices=(m_indices, "m", INDICES), out=(out, "?m n")
    )  # fmt: skip
    granularity = checked_granularity(name, scale_granularity_mnk)
    result = output(name, out, a, (m, n), out_dtype, zeros=True)
    groups = Groups(*group_ranges(name, m_indices, experts))
    names = {"m_indptr": "m_indices", "m_counts": "m_indices"}
    groupwise(name, result, a, b, a_scale, b_scale, granularity, groups, names=names)
    return result


def pad_indptr_to_multiple_of_4(m_indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the number of rows of each group up to a multiple of 4, for callers whose other kernels need it.

    :func:`group_gemm_fp8_nt_groupwise` takes any numbers of rows and needs no padding.

    Args:
        m_indptr: ``[e + 1]`` ascending integers from 0: group i has the rows ``m_indptr[i]`` to
            ``m_indptr[i + 1]``.

    Returns:
        ``(padded_m_indptr, padded_m_rank)``, int32 ``[e + 1]`` and ``[m_indptr[-1]]`` on m_indptr's device:
        the padded
        groups, and the padded row of each row: ``padded[padded_m_rank] = a``,
            ``out = padded_out[padded_m_rank]``.

    Raises:
        ValueError: no vector, or on the CPU offsets that do not ascend from 0.
        TypeError: no integers.
        CaptureError: a CUDA graph is captured, and the host reads the last offset.
    """
    name = "pad_indptr_to_multiple_of_4"
    bounds = index_table(name, "m_indptr", m_indptr)
    check_range(name, "m_indptr", bounds.shape[0], 1, unit="elements")
    if bounds.is_cuda:
        refuse_capture(f"{name}: the host would wait for m_indptr", "call it, or with m_indptr on the CPU")
    counts = bounds.diff()
    if not bounds.is_cuda and (int(bounds[0]) != 0 or bool((counts < 0).any())):
        raise value_error(name, "m_indptr", bounds.tolist(), "offsets that rise from 0")
    padded = torch.zeros_like(bounds)
    padded[1:] = ((counts + 3) // 4 * 4).cumsum(0)
    shifts = (padded - bounds)[:-1].repeat_interleave(counts)
    return padded, torch.arange(shifts.shape[0], dtype=torch.int32, device=bounds.device) + shifts


def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: Granularity | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the first rows of each matrix of a batch.

    Rows after ``masked_m`` are neither read nor written.

    Args:
        a: ``[e, m, k]``, float8_e4m3fn or float8_e5m2.
        b: ``[e, n, k]``.
        a_scale: float32 ``[e, m, k / gk]``; b_scale: float32 ``[e, n / gn, k / gk]``.
        masked_m: int32 or int64 ``[e]`` on the device: the number of valid rows. On CUDA numbers are clamped
            to 0 to m.
        expected_m: accepted and unused.
        scale_granularity_mnk: ``(1, 128, 128)`` by default; its first number is 1.
        out: ``[e, m, n]``; a new one has zeros in invalid rows.
        out_dtype: dtype of the result; by default that of ``out``, or bfloat16.

    Returns:
        ``[e, m, n]``.

    Raises:
        ValueError, TypeError, GradientError: as :func:`gemm_fp8_nt_groupwise`.
    """
    name = "batch_deepgemm_fp8_nt_groupwise"
    batch, m, _, n = check_tensors(
        name, a=(a, "e m k", FP8), b=(b, "e n k", FP8), masked_m=(masked_m, "e"), out=(out, "?e m n")
    )  # fmt: skip
    granularity = checked_granularity(name, scale_granularity_mnk)
    if granularity[0] != 1:
        raise value_error(name, "scale_granularity_mnk", granularity, "1 as its first number")
    result = output(name, out, a, (batch, m, n), out_dtype, zeros=True)
    groupwise(name, result, a, b, a_scale, b_scale, granularity, Groups(None, masked_m), names={"m_counts": "masked_m"})
    return result


def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``input @ weight.T`` in fp8 with a scale for each 128 numbers of the depth, on every device.

    Args:
        input: ``[m, k]``, k a multiple of 128: bfloat16, which is quantised here, or float8_e4m3fn with
            ``input_scale``.
        weight: ``[n, k]``: float8_e4m3fn with ``weight_scale``, or bfloat16 if the input is bfloat16.
        input_scale: float32 ``[k / 128, m]``, or ``[m, k / 128]`` where that is another shape.
        weight_scale: float32 ``[n, k / 128]``, or ``[n / 128, k / 128]`` (n rounded up).
        out: ``[m, n]``, written.
        out_dtype: bfloat16 by default.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError: invalid shapes, missing scales, scales for bfloat16, or invalid dtypes of input and weight.
        TypeError: invalid dtypes of scales, out and out_dtype.
        GradientError: a tensor requires a gradient; there is none.
    """
    name = "fp8_blockscale_gemm_sm90"
    m, k, n = check_tensors(name, input=(input, "m k"), weight=(weight, "n k"), out=(out, "?m n"))
    if k % BLOCK != 0:
        raise value_error(name, "input", f"a depth of {k}", f"one divisible by block size {BLOCK}")
    if input.dtype == torch.float8_e4m3fn and weight.dtype == torch.bfloat16:
        raise value_error(name, "weight", weight.dtype, "FP8: FP8 input with BF16 weight is not supported")
    depths = k // BLOCK
    if input_scale is not None and tuple(input_scale.shape) == (depths, m):
        input_scale = input_scale.t()
    a, a_scale = in_eight_bits(name, "input", input, input_scale, (m, depths))
    b, b_scale = in_eight_bits(name, "weight", weight, weight_scale, (n, depths), (blocks(n, BLOCK), depths))
    granularity = (1, 1 if b_scale.shape[0] == n else BLOCK, BLOCK)
    result = output(name, out, input, (m, n), out_dtype)
    groupwise(name, result, a, b, a_scale, b_scale, granularity, names=_LAYER_NAMES)
    return result
