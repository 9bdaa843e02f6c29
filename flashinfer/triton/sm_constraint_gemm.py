"""Products that add to what they write, under the names of FlashInfer's kernels for a part of the SMs.

``num_sms`` is accepted and checked. Kernels here take the SMs that they get: to leave some of them to others is for the
caller's streams and green contexts.
"""

from __future__ import annotations

import torch

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
    """``alpha * (a @ b) + beta * c``, computed in float32 and rounded once.

    Args:
        a: ``[m, k]``: float32, float16, bfloat16 or float8_e4m3fn, of any strides.
        b: ``[k, n]``, of the same dtype and any strides.
        c: ``[m, n]`` to be written; not read where ``beta`` is 0. Made where not given.
        out_dtype: of the result where ``c`` is not given; by default that of ``a``, of eight bits bfloat16.

    Returns:
        ``[m, n]``, ``c`` where it was given.

    Raises:
        ValueError: shapes that do not fit, or ``beta`` without ``c``.
        TypeError: dtypes that do not fit.
        GradientError: a tensor wants a gradient; there is none.
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
    """:func:`gemm`; ``num_sms``, 1 or more, changes nothing."""
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
    """:func:`gemm` of ``b`` as ``[n, k]``; ``num_sms``, 1 or more, and ``EPILOGUE_SUBTILE`` change nothing."""
    _check_sms("gemm_descriptor_persistent", num_sms)
    if b.dim() != 2:
        raise ValueError(f"gemm_descriptor_persistent: b: got {b.dim()} dimensions, wanted 2")
    return _product("gemm_descriptor_persistent", a, b.t(), c, alpha, beta, out_dtype)


def _check_sms(function: str, num_sms: int | None) -> None:
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"{function}: num_sms: got {num_sms}, wanted 1 or more")


def _product(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{function}: got shapes {list(a.shape)} and {list(b.shape)}, wanted [m, k] and [k, n]")
    if a.dtype != b.dtype:
        raise TypeError(f"{function}: b: got {b.dtype}, wanted {a.dtype}")
    shape = (a.shape[0], b.shape[1])
    if c is not None and c.shape != shape:
        raise ValueError(f"{function}: c: got shape {list(c.shape)}, wanted {list(shape)}")
    if c is None and beta != 0:
        raise ValueError(f"{function}: beta: got {beta} without c, wanted 0")
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
