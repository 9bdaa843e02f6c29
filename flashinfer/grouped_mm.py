"""Products of groups of rows in 16 bits, under the name that newer callers use."""

from __future__ import annotations

import torch

from ._gemm.arguments import OUTPUTS, matrices, output, rows
from ._gemm.operators import grouped_gemm
from ._ops.bind import bind

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
    m, _, _, n = bind(
        name, a=(a, "m k", OUTPUTS), b=(b, "e n k", "a"), m_indptr=(m_indptr, "e+1"), out=(out, "?m n")
    )  # fmt: skip
    result = output(name, out, a, (m, n), out_dtype, zeros=True)
    grouped_gemm(result, rows(a), matrices(b), None, None, m_indptr, None, None, None, None, 0, 0, 0)
    return result
