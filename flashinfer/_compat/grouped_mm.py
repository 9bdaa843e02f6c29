"""Products of groups of rows: the function of :mod:`flashinfer.grouped_mm`."""

from __future__ import annotations

import torch

from .._gemm.arguments import OUTPUTS, matrices, output, rows
from .._gemm.operators import grouped_gemm
from .._ops.shapes import check_tensors

__all__ = ["grouped_mm_bf16"]


def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute ``out[group i] = a[group i] @ b[i].T`` for consecutive groups of rows.

    Args:
        a: ``[m, k]``: bfloat16, float16 or float32.
        b: ``[e, n, k]``, same dtype; row-major or column-major matrices.
        m_indptr: ``[e + 1]``, int32 or int64 on the device: group i has the rows ``m_indptr[i]`` to
            ``m_indptr[i + 1]``.
            On CUDA the table is not checked: groups end at the last row of ``a``, and a negative range is empty.
            A row in two groups has the product of either.
        out: ``[m, n]``. Only rows of groups are written; a new one has zeros in the others.
        out_dtype: dtype of the result and of ``out``.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError: invalid shapes or devices, or on the CPU groups of invalid rows.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    name = "grouped_mm_bf16"
    m, _, _, n = check_tensors(
        name, a=(a, "m k", OUTPUTS), b=(b, "e n k", "a"), m_indptr=(m_indptr, "e+1"), out=(out, "?m n")
    )  # fmt: skip
    result = output(name, out, a, (m, n), out_dtype, zeros=True)
    grouped_gemm(result, rows(a), matrices(b), None, None, m_indptr, None, None, None, None, 0, 0, 0)
    return result
