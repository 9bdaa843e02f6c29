"""Calls of the gemm family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer import gemm
from flashinfer.grouped_mm import grouped_mm_bf16

from ..support.cases import Case, Cases

FP8 = torch.float8_e4m3fn


def eight_bits(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(FP8)


def operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    a, b, out = (torch.randn(shape, device=device) for shape in ((9, 24), (3, 13, 24), (9, 13)))
    indptr = torch.tensor([0, 2, 2, 8], dtype=torch.int32, device=device)
    masked = torch.tensor([1, 0, 3], device=device)
    index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    of_rows = torch.arange(9, dtype=torch.int32, device=device).flip(0)
    scales = torch.rand(9, 2, device=device), torch.rand(3, 1, 2, device=device)
    return {
        "grouped_gemm": [
            (out, a, b, None, None, indptr, None, None, None, None, 0, 0, 0, 0, 0),
            (
                out.clone(), eight_bits(9, 24, device=device), eight_bits(3, 13, 24, device=device), *scales, None,
                masked, index, of_rows, torch.rand(9, device=device), 1, 16, 16, 0, 0,
            ),
        ]
    }  # fmt: skip


def functions(device: str) -> dict[str, Case]:
    """Return calls of the functions. The last part of a batch or of rows takes the remainder."""

    def one(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) + 0.5

    def pairs(n: int) -> dict[str, Any]:
        b = eight_bits(n, 33, 48, device=device).transpose(1, 2)
        scales = dict(A_scale=one(1)[0], B_scale=one(1)[0])
        return dict(A=eight_bits(n, 3, 48, device=device), B=b, **scales)

    def bmm_to_bfloat16(**operands: torch.Tensor) -> torch.Tensor:
        return gemm.bmm_fp8(**operands, dtype=torch.bfloat16)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def blocked(n: int) -> dict[str, Any]:
        scales = dict(a_scale=one(n, 2), b_scale=one(2, 2))
        a, b = eight_bits(n, 256, device=device), eight_bits(136, 256, device=device)
        return dict(a=a, b=b, **scales, scale_major_mode="K")

    def of_blocks(n: int) -> dict[str, Any]:
        return blocked(n) | dict(a_scale=one(1, 2))

    def grouped(n: int) -> dict[str, Any]:
        scales = dict(a_scale=one(n, 2), b_scale=one(3, 2, 2))
        return dict(a=eight_bits(n, 256, device=device), b=eight_bits(3, 136, 256, device=device), **scales)

    def indptr(n: int) -> torch.Tensor:
        return torch.tensor([0, 2, 2, n], dtype=torch.int32, device=device)

    def named(n: int) -> dict[str, Any]:
        return dict(grouped(n), m_indices=torch.arange(n, device=device) * 3 // n)

    def masked(n: int) -> dict[str, Any]:
        operands = dict(a=eight_bits(n, 4, 128, device=device), b=eight_bits(n, 24, 128, device=device))
        scales = dict(a_scale=one(n, 4, 1), b_scale=one(n, 1, 1))
        return dict(operands, **scales, masked_m=torch.arange(n, device=device) % 5, expected_m=2)

    def quantised(n: int) -> dict[str, Any]:
        return dict(input=half(n, 256), weight=eight_bits(136, 256, device=device), weight_scale=one(2, 2))

    calls: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
        "bmm_fp8": (bmm_to_bfloat16, pairs),
        "mm_bf16": (gemm.mm_bf16, lambda n: dict(a=half(n, 48), b=half(48, 33))),
        "bmm_bf16": (gemm.bmm_bf16, lambda n: dict(A=half(n, 3, 48), B=half(n, 48, 33))),
        "gemm_fp8_nt_groupwise": (gemm.gemm_fp8_nt_groupwise, blocked),
        "gemm_fp8_nt_blockscaled": (gemm.gemm_fp8_nt_blockscaled, of_blocks),
        "group_gemm_fp8_nt_groupwise": (
            gemm.group_gemm_fp8_nt_groupwise,
            lambda n: dict(grouped(n), m_indptr=indptr(n), scale_major_mode="K"),
        ),
        "group_deepgemm_fp8_nt_groupwise": (gemm.group_deepgemm_fp8_nt_groupwise, named),
        "group_gemm_fp8_nt_groupwise_contiguous": (gemm.group_gemm_fp8_nt_groupwise_contiguous, named),
        "batch_deepgemm_fp8_nt_groupwise": (gemm.batch_deepgemm_fp8_nt_groupwise, masked),
        "fp8_blockscale_gemm_sm90": (gemm.fp8_blockscale_gemm_sm90, quantised),
        "grouped_mm_bf16": (
            grouped_mm_bf16,
            lambda n: dict(a=half(n, 48), b=half(3, 33, 48), m_indptr=indptr(n)),
        ),
    }
    return {name: Case(function, arguments) for name, (function, arguments) in calls.items()}


CASES = Cases(operators, functions)
