"""The operator of grouped GEMM against float64: groups, strides, element types, untouched memory."""

from __future__ import annotations

import pytest
import torch

from flashinfer._gemm.operators import grouped_gemm
from flashinfer.gemm import bmm_bf16, mm_bf16
from flashinfer.grouped_mm import grouped_mm_bf16

from ..conftest import no_synchronisation
from .oracle import SENTINEL, assert_product, drawn, integers, product

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NOTHING = (None,) * 7  # scales, tables and factors


def indptr_of(sizes: list[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=dtype, device=device)


def by_groups(a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of all groups in float64, and those of the magnitudes."""
    parts = [product(rows.double(), b[g].double()) for g, rows in enumerate(a[: sum(sizes)].split(sizes))]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    return want, magnitude


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "sizes, n, k",
    [
        ([1], 64, 128),
        ([3, 0, 7, 0], 72, 80),
        ([0, 0, 130, 1, 63], 200, 328),
        ([65, 8, 9, 16, 17, 2], 136, 1032),
        ([5, 20], 67, 33),
        ([4], 1, 1),
    ],
)
def test_groups(sizes, n, k, dtype, device):
    """Use matrices contiguous along k and, except for fp8, along n. Rows after the last group are not written."""
    m = sum(sizes)
    a, b = drawn(m + 3, k, dtype=dtype, device=device), drawn(len(sizes), n, k, dtype=dtype, device=device)
    want, magnitude = by_groups(a, b, sizes)
    layouts = [b] if b.itemsize == 1 else [b, b.transpose(1, 2).contiguous().transpose(1, 2)]
    results = []
    for matrix in layouts:
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.full((m + 3, n), SENTINEL, dtype=out_dtype, device=device)
            indptr = indptr_of(sizes, device, torch.int64 if out_dtype == torch.float16 else torch.int32)
            with no_synchronisation("cpu" if not results else device):
                grouped_gemm(out, a, matrix, None, None, indptr, *NOTHING[3:], 0, 0, 0)
            assert bool((out[m:] == SENTINEL).all())
            assert_product(out[:m], want, magnitude, dtype)
            results.append(out)


@pytest.mark.parametrize("dtype", TYPES)
def test_integers_are_exact(dtype, device):
    sizes, n, k = [7, 0, 129, 33, 1], 152, 8192 if device == "cuda" else 2048
    a = integers(sum(sizes), k, dtype=dtype, device=device)
    b = integers(len(sizes), n, k, dtype=dtype, device=device)
    out = torch.empty(sum(sizes), n, device=device)
    grouped_gemm(out, a, b, None, None, indptr_of(sizes, device), *NOTHING[3:], 0, 0, 0)
    assert torch.equal(out.double(), by_groups(a, b, sizes)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tables(dtype, device):
    """Use counts with and without offsets, indices of matrices and rows, row factors, and invalid indices."""
    e, room, n, k = 4, 6, 40, 56
    a = drawn(9, k, dtype=dtype, device=device)
    b = drawn(e + 1, n, k, dtype=dtype, device=device)
    most = 9 if device == "cuda" else room  # on the CPU too many rows are an error
    counts, index, rows = [6, 0, most, 2], [4, 0, 1, 2], torch.randint(0, 9, (e * room,))
    factor = torch.rand(e * room)
    out = torch.full((e * room, n), SENTINEL, device=device)
    want = out.double().cpu()
    magnitude = torch.zeros_like(want)
    for g in range(e):
        for r in range(g * room, g * room + min(counts[g], room)):
            left, right = a[rows[r]].double().cpu()[None] * factor[r].double(), b[index[g]].double().cpu()
            want[r], magnitude[r] = (one[0] for one in product(left, right))
    on = dict(device=device, dtype=torch.int32)
    tables = torch.tensor(counts, **on), torch.tensor([*index[:3], 2], **on), rows.int().to(device), factor.to(device)
    grouped_gemm(out, a, b, None, None, None, *tables, 0, 0, 0)
    assert_product(out.cpu(), want, magnitude, dtype)
    moved = torch.full_like(out, SENTINEL)
    begins = torch.arange(0, e * room + 1, room, device=device)
    grouped_gemm(moved, a, b, None, None, begins, torch.tensor([6, 0, 6, 2], device=device), *tables[1:], 0, 0, 0)
    assert torch.equal(moved, out)
    # An invalid matrix leaves its rows untouched, and an invalid row counts as zeros.
    tables[1][0], tables[1][2], tables[2][19] = -1, e + 1, 100
    other = torch.full_like(out, SENTINEL)
    grouped_gemm(other, a, b, None, None, None, *tables, 0, 0, 0)
    assert torch.equal(other[20:], out[20:]) and bool((other[19] == 0).all()) and bool((other[:18] == SENTINEL).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strides(dtype, device):
    """Use columns of a projection, a matrix inside a larger one, and results inside a larger buffer."""
    whole_a, whole_b = drawn(2, 9, 3, 64, dtype=dtype, device=device), drawn(3, 60, 90, dtype=dtype, device=device)
    a, b = whole_a[:, :, 1, 5:53], whole_b[:, 7:57, 11:59]
    buffer = torch.full((2, 9, 70), SENTINEL, dtype=dtype, device=device)
    out = buffer[..., 9:59]
    indptr = indptr_of([4, 5, 8], device)
    grouped_gemm(out, a, b, None, None, indptr, *NOTHING[3:], 0, 0, 0)
    want, magnitude = by_groups(a.reshape(18, 48), b, [4, 5, 8])
    assert_product(out.reshape(18, 50)[:17], want, magnitude, dtype)
    assert bool((buffer[..., :9] == SENTINEL).all() and (buffer[..., 59:] == SENTINEL).all())
    assert bool((out[1, 8] == SENTINEL).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_independent(dtype, device):
    """Check that a row has the same bits for any other rows, and that NaN stays in its group."""
    n, k = 200, 700
    a, b = drawn(300, k, dtype=dtype, device=device), drawn(2, n, k, dtype=dtype, device=device)
    out = torch.empty(300, n, device=device)
    grouped_gemm(out, a, b[:1], *NOTHING, 0, 0, 0)
    for rows in ([3], list(range(5, 18)), list(range(90, 260))):
        few = torch.empty(len(rows), n, device=device)
        grouped_gemm(few, a[rows], b[:1], *NOTHING, 0, 0, 0)
        assert torch.equal(few, out[rows])
    a[:17], b[1, 3] = float("nan"), float("nan")
    again = torch.empty_like(out)
    grouped_gemm(again, a, b, None, None, indptr_of([17, 283], device), *NOTHING[3:], 0, 0, 0)
    assert bool(again[:17].isnan().all()) and bool(again[17:, 3].isnan().all())
    kept = [column for column in range(n) if column != 3]
    assert bool(again[17:, kept].isfinite().all())


def test_no_rows_no_columns_no_depth(device):
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    for m, n, k, e in ((0, 5, 7, 2), (4, 0, 7, 2), (4, 5, 0, 2), (0, 5, 7, 0)):
        out = torch.full((m, n), SENTINEL, device=device)
        a, b = torch.ones(m, k, device=device), torch.ones(e, n, k, device=device)
        grouped_gemm(out, a, b, None, None, zeros[: e + 1], *NOTHING[3:], 0, 0, 0)
        assert bool((out == SENTINEL).all())
    out = torch.full((4, 5), SENTINEL, device=device)
    grouped_gemm(out, torch.ones(4, 0, device=device), torch.ones(2, 5, 0, device=device), *NOTHING, 0, 0, 0)
    assert bool((out == 0).all())


def test_many_groups(device):
    sizes = torch.randint(0, 4, (1024,)).tolist()
    a, b = (
        drawn(sum(sizes), 32, dtype=torch.bfloat16, device=device),
        drawn(1024, 24, 32, dtype=torch.bfloat16, device=device),
    )
    out = grouped_mm_bf16(a, b, indptr_of(sizes, device), out_dtype=torch.float32)
    assert_product(out, *by_groups(a, b, sizes), torch.bfloat16)


def test_dense_and_batched(dtype, device):
    a, b, bias = (drawn(*shape, dtype=dtype, device=device) for shape in ((37, 100), (100, 75), (75,)))
    want, magnitude = product(a.double(), b.double().t())
    assert_product(mm_bf16(a, b, out_dtype=torch.float32), want, magnitude, dtype)
    assert_product(mm_bf16(a, b.t().contiguous().t(), out_dtype=torch.float32), want, magnitude, dtype)
    biased = mm_bf16(a, b, bias.float(), out_dtype=torch.float32)
    assert_product(biased, want + bias.double(), magnitude + bias.double().abs(), dtype)
    batch, matrices = drawn(3, 5, 64, dtype=dtype, device=device), drawn(3, 64, 40, dtype=dtype, device=device)
    want, magnitude = product(batch.double(), matrices.double().transpose(1, 2))
    out = torch.full((3, 7, 40), SENTINEL, device=device)
    assert bmm_bf16(batch, matrices, out=out[:, :5], out_dtype=torch.float32).data_ptr() == out.data_ptr()
    assert_product(out[:, :5], want, magnitude, dtype)
    assert bool((out[:, 5:] == SENTINEL).all())
