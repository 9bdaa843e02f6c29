"""Arguments that the operator of grouped GEMM refuses before it writes anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._gemm.operators import grouped_gemm
from flashinfer.errors import GradientError
from flashinfer.gemm import bmm_bf16, bmm_fp8, mm_bf16

from .oracle import SENTINEL

E4M3 = torch.float8_e4m3fn
NAMES = (
    "out",
    "a",
    "b",
    "a_scale",
    "b_scale",
    "m_indptr",
    "m_counts",
    "b_indices",
    "a_rows",
    "row_scale",
    "gm",
    "gn",
    "gk",
)


def operands(device: str) -> dict[str, Any]:
    out = torch.full((6, 5), SENTINEL, device=device)
    given = dict(out=out, a=torch.ones(6, 8, device=device), b=torch.ones(2, 5, 8, device=device), gm=0, gn=0, gk=0)
    return {name: given.get(name) for name in NAMES}


def changes(device: str) -> list[tuple[type[Exception], str, dict[str, Any]]]:
    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, device=device).to(dtype)

    eight = dict(a=ones(6, 8, dtype=E4M3), b=ones(2, 5, 8, dtype=E4M3))
    integers = ones(3, dtype=torch.int32)
    shared = ones(6, 5)
    return [
        (TypeError, "a: got int32", dict(a=ones(6, 8, dtype=torch.int32))),
        (TypeError, "b: got float16, wanted float32 as a has", dict(b=ones(2, 5, 8, dtype=torch.float16))),
        (TypeError, "b: got float32, wanted float8_e4m3fn or float8_e5m2", dict(a=eight["a"])),
        (TypeError, "out: got float8_e4m3fn", dict(out=ones(6, 5, dtype=E4M3))),
        (ValueError, "a: got 1 dimensions, wanted 2 to 3", dict(a=ones(8))),
        (ValueError, "a: got 4 rows, wanted 6 as out has", dict(a=ones(4, 8))),
        (ValueError, r"b: got shape \[2, 5, 7\], wanted \[any, 5, 8\]", dict(b=ones(2, 5, 7))),
        (ValueError, "a: got stride 6 of the last dimension", dict(a=ones(8, 6).t())),
        (ValueError, "b: got strides of both last dimensions", dict(b=ones(2, 10, 16)[:, ::2, ::2])),
        (ValueError, "b: got a stride of the last dimension, wanted 1", eight | dict(b=ones(2, 8, 5, dtype=E4M3).mT)),
        (ValueError, "out: overlaps the memory of a", dict(out=shared, a=shared, b=ones(2, 5, 5))),
        (ValueError, "out: got 6 rows, wanted a multiple of 4", dict(b=ones(4, 5, 8))),
        (ValueError, "out: got a batch of 3, wanted 2", dict(out=ones(3, 2, 5))),
        (ValueError, "b: got 2 matrices for 3 groups", dict(m_counts=integers)),
        (ValueError, "m_indptr: got no element", dict(m_indptr=integers[:0])),
        (TypeError, "m_indptr: got float32, wanted int32 or int64", dict(m_indptr=ones(3))),
        (ValueError, "m_indptr: got 2 dimensions", dict(m_indptr=integers[None])),
        (ValueError, "m_indptr: is not contiguous", dict(m_indptr=ones(6, dtype=torch.int32)[::2])),
        (ValueError, "m_counts: got 3 elements, wanted 2, one for each group", dict(m_indptr=integers, m_counts=integers)),
        (ValueError, "b_indices: got 3 elements, wanted 2", dict(m_indptr=integers, b_indices=integers)),
        (TypeError, "a_rows: got int64, wanted int32", dict(a_rows=ones(6, dtype=torch.int64))),
        (ValueError, r"a_rows: got shape \[3\], wanted \[6\]", dict(a_rows=integers)),
        (TypeError, "row_scale: got float16, wanted float32", dict(row_scale=ones(6, dtype=torch.float16))),
        (TypeError, "a_scale: got float16, wanted float32", dict(a_scale=ones(1, 1, dtype=torch.float16))),
        (ValueError, "a_scale: got 3 dimensions, wanted 2", dict(a_scale=ones(1, 1, 1))),
        (ValueError, "a_scale: got 5 elements in dimension 0, wanted 1 or 6", dict(a_scale=ones(5, 1), gm=1)),
        (ValueError, "a_scale: got 3 elements in dimension 1, wanted 1", dict(a_scale=ones(1, 3))),
        (ValueError, "b_scale: got 3 elements in dimension 0, wanted 1 or 2", dict(b_scale=ones(3, 1, 1))),
        (ValueError, "granularity_m: got a negative number", dict(gm=-1)),
        (ValueError, "granularity_k: got scales along the depth of float32, wanted fp8", dict(a_scale=ones(1, 2), gk=4)),
        (
            ValueError,
            "granularity_m: got more than 1 for an a of three dimensions",
            dict(a=ones(2, 3, 8), out=ones(2, 3, 5), a_scale=ones(2, 2, 1), gm=2),
        ),
        (GradientError, "has no gradient", dict(a=ones(6, 8).requires_grad_())),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message, tables",
    [
        ("m_indptr: got begin -1 of group 0, wanted 0 to 6", dict(m_indptr=[-1, 2, 6])),
        ("m_indptr: got end 1 of group 1, wanted 2 to 6", dict(m_indptr=[0, 2, 1])),
        ("m_indptr: got end 7 of group 1, wanted 2 to 6", dict(m_indptr=[0, 2, 7])),
        ("m_counts: got count -1 of group 1, wanted 0 to 3", dict(m_counts=[3, -1])),
        ("m_counts: got count 4 of group 0, wanted 0 to 3", dict(m_counts=[4, 0])),
        ("m_counts: got count 3 of group 1, wanted 0 to 2", dict(m_indptr=[0, 4, 6], m_counts=[6, 3])),
        ("m_indptr: got begin 7 of group 1, wanted 0 to 6", dict(m_indptr=[0, 7, 6], m_counts=[1, 0])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_are_checked_on_the_cpu(message, tables, dtype):
    given = operands("cpu")
    with pytest.raises(ValueError, match=f"^grouped_gemm: {message}$"):
        grouped_gemm(*(given | {name: torch.tensor(table, dtype=dtype) for name, table in tables.items()}).values())
    assert bool((given["out"] == SENTINEL).all())


def of_mm(device: str) -> dict[str, Any]:
    a, b = torch.ones(3, 4, device=device), torch.ones(4, 5, device=device)
    return dict(a=a, b=b, bias=torch.ones(5, device=device), out=torch.full((3, 5), SENTINEL, device=device))


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "bias: got float, wanted Tensor", lambda bias: 1.0),
        (TypeError, "bias: got torch.int64", lambda bias: bias.long()),
        (ValueError, "bias: got 2 dimensions, wanted 1", lambda bias: bias.expand(3, 5)),
        (ValueError, r"bias: got shape \[2\], wanted \[5\]", lambda bias: bias[:2]),
        (ValueError, "bias: got a tensor on meta, wanted one on (cpu|cuda:0)", lambda bias: bias.to("meta")),
        (GradientError, "bias: has no gradient", lambda bias: bias.requires_grad_()),
    ],
)
def test_bias(error, message, change, device):
    given = of_mm(device)
    with pytest.raises(error, match=f"^mm_bf16: {message}"):
        mm_bf16(**(given | dict(bias=change(given["bias"]))), out_dtype=torch.float32)
    assert bool((given["out"] == SENTINEL).all())


def test_mistakes_of_batches_are_the_functions(device):
    a, b, one = torch.ones(2, 3, 4, device=device), torch.ones(1, 4, 5, device=device), torch.ones(1, device=device)
    with pytest.raises(ValueError, match=r"^bmm_fp8: B: got shape \[1, 4, 5\], wanted \[2, 4, any\]"):
        bmm_fp8(a.to(E4M3), b.to(E4M3), one, one, torch.float16)
    with pytest.raises(ValueError, match=r"^bmm_bf16: B: got shape \[1, 4, 5\], wanted \[2, 4, any\]"):
        bmm_bf16(a, b)
    with pytest.raises(ValueError, match="^bmm_bf16: out: overlaps the memory"):
        bmm_bf16(a, b.expand(2, 4, 5)[..., :4], out=a, out_dtype=torch.float32)


@pytest.mark.parametrize("number", range(len(changes("cpu"))))
def test_mistakes(number, device):
    error, message, change = changes(device)[number]
    given = operands(device)
    with pytest.raises(error, match=message):
        grouped_gemm(*(given | change).values())
    assert bool((given["out"] == SENTINEL).all())
