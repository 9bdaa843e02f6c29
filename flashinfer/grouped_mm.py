"""Products of groups of rows in 16 bits, under the name that newer callers use."""

from __future__ import annotations

import torch

from ._gemm.arguments import OUTPUTS, check_dims, check_dtype, check_same_depth, check_shape, matrices, output, rows
from ._gemm.operators import grouped_gemm

__all__ = ["grouped_mm_bf16"]


def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``out[group i] = a[group i] @ b[i].T`` for groups of rows one after the other.

    Args:
        a: ``[m, k]``: bfloat16, float16 or float32.
        b: ``[e, n, k]``, same dtype; the last two dimensions in either order of memory.
        m_indptr: ``[e + 1]``, int32 or int64 on the device: group i has the rows ``m_indptr[i]`` to ``m_indptr[i + 1]``.
            On CUDA no table is an error: groups end where ``a`` does, one that ends before it begins is empty, and rows
            of two have the product of either.
        out: ``[m, n]``, of which rows of groups are written; a new one has zeros in the others.
        out_dtype: of the result, and of ``out``.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError: shapes or devices that do not fit, on the CPU groups of rows that there are not.
        TypeError: dtypes that do not fit.
        GradientError: a tensor wants a gradient; there is none.
    """
    name = "grouped_mm_bf16"
    check_dims(name, 2, a=a)
    check_dims(name, 3, b=b)
    check_dims(name, 1, m_indptr=m_indptr)
    check_dtype(name, "a", a.dtype, OUTPUTS)
    check_dtype(name, "b", b.dtype, (a.dtype,))
    check_same_depth(name, a, b, ("a", "b"))
    check_shape(name, "m_indptr", m_indptr, (b.shape[0] + 1,))
    result = output(name, out, a, (a.shape[0], b.shape[1]), out_dtype, zeros=True)
    grouped_gemm(result, rows(a), matrices(b), None, None, m_indptr, None, None, None, None, 0, 0, 0)
    return result
