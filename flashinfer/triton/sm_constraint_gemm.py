"""Products that accumulate into their output, under the names of FlashInfer's kernels for a part of the SMs.

``num_sms`` is accepted and checked. Kernels here use all free SMs. Callers can reserve SMs with streams and
green contexts.
"""

from __future__ import annotations

import torch

from .._ops.errors import value_error
from .._ops.numbers import positive
from .._ops.shapes import check_tensors
from ..gemm import bmm_fp8, mm_bf16

__all__ = ["gemm", "gemm_descriptor_persistent", "gemm_persistent"]

_FP8 = torch.float8_e4m3fn


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``alpha * (a @ b) + beta * c`` in float32 and round once.

    Args:
        a: ``[m, k]``: float32, float16, bfloat16 or float8_e4m3fn, of any strides.
        b: ``[k, n]``, of the same dtype and any strides.
        c: ``[m, n]``, written; not read if ``beta`` is 0. Allocated by default.
        out_dtype: dtype of the result without ``c``; by default that of ``a``, and bfloat16 for eight bits.

    Returns:
        ``[m, n]``; ``c`` itself if it is passed.

    Raises:
        ValueError: invalid shapes, or ``beta`` without ``c``.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient; there is none.
    """
    return _product("gemm", a, b, c, alpha, beta, out_dtype)


def gemm_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """Call :func:`gemm`; ``num_sms``, 1 or more, has no effect."""
    _check_sms("gemm_persistent", num_sms)
    return _product("gemm_persistent", a, b, c, alpha, beta, out_dtype)


def gemm_descriptor_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    EPILOGUE_SUBTILE: bool = False,
) -> torch.Tensor:
    """Call :func:`gemm` with ``b`` as ``[n, k]``; ``num_sms`` and ``EPILOGUE_SUBTILE`` have no effect."""
    _check_sms("gemm_descriptor_persistent", num_sms)
    check_tensors("gemm_descriptor_persistent", b=(b, "_ _"))
    return _product("gemm_descriptor_persistent", a, b.t(), c, alpha, beta, out_dtype)


def _check_sms(function: str, num_sms: int | None) -> None:
    if num_sms is not None:
        positive(function, "num_sms", num_sms)


def _product(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    check_tensors(function, a=(a, "m k"), b=(b, "k n", "a"), c=(c, "?m n"))
    if c is None and beta != 0:
        raise value_error(function, "beta", f"{beta} without c", 0)
    rows, matrix = a.contiguous(), b if 1 in b.stride() else b.contiguous()
    if a.dtype == _FP8:
        one = torch.ones(1, device=a.device)
        product = bmm_fp8(rows[None], matrix[None], one, one, torch.float32)[0]
    else:
        product = mm_bf16(rows, matrix, out_dtype=torch.float32)
    result = product.mul_(alpha)
    if c is None:
        return result.to((torch.bfloat16 if a.dtype == _FP8 else a.dtype) if out_dtype is None else out_dtype)
    return c.copy_(result if beta == 0 else result.add_(c.float(), alpha=beta))
