"""Segments of rows with matrices of their own, as in LoRA adapters."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm import SegmentGEMMWrapper

from .oracle import SENTINEL, assert_product, drawn, product


def wrapper(device: str) -> SegmentGEMMWrapper:
    return SegmentGEMMWrapper(torch.empty(1024, dtype=torch.int8, device=device))


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_segments(column_major, indexed, dtype, device):
    lens, d_in, d_out = [3, 0, 99, 1, 10], 72, 136
    x = drawn(sum(lens), d_in, dtype=dtype, device=device)
    shape = (7, d_out, d_in) if column_major else (7, d_in, d_out)
    weights = drawn(*shape, dtype=dtype, device=device)
    indices = torch.tensor([6, 0, 3, 3, 1]) if indexed else None
    y = wrapper(device).run(
        x, weights, 5, column_major, seg_lens=torch.tensor(lens), weight_indices=None if indices is None else indices.to(device)
    )  # fmt: skip
    of = indices.tolist() if indices is not None else range(5)
    b = weights.double() if column_major else weights.double().transpose(1, 2)
    parts = [product(rows.double(), b[i]) for i, rows in zip(of, x.split(lens), strict=True)]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    assert y.dtype == dtype
    assert_product(y, want, magnitude, dtype)


def test_low_rank_adapters(device):
    """Compute the adapters of a batch, down and up, with one wrapper."""
    lens, rank, hidden = [5, 1, 2], 8, 96
    x = drawn(8, hidden, dtype=torch.float32, device=device)
    down, up = (drawn(*shape, dtype=torch.float32, device=device) for shape in ((4, rank, hidden), (4, hidden, rank)))
    indptr, indices = torch.tensor([0, 5, 6, 8]), torch.tensor([2, 0, 2])
    run = wrapper(device).forward
    low = run(x, down, 3, True, seg_indptr=indptr, weight_indices=indices)
    y = run(low, up, 3, True, seg_indptr=indptr, weight_indices=indices, seg_lens=torch.tensor([1, 1, 1]))
    want = torch.cat([part.double() @ (up[i].double() @ down[i].double()).T for i, part in zip((2, 0, 2), x.split(lens), strict=True)])  # fmt: skip
    torch.testing.assert_close(y.double(), want, atol=1e-3, rtol=1e-4)


def test_rows_of_no_segment(device):
    x, weights = torch.ones(6, 16, device=device), torch.ones(1, 16, 16, device=device)
    indptr = torch.tensor([2, 4], device=device)
    assert wrapper(device).run(x, weights, 1, True, seg_indptr=indptr)[:, 0].tolist() == [0, 0, 16, 16, 0, 0]
    out = torch.full((6, 16), SENTINEL, device=device)
    assert wrapper(device).run(x, weights, 1, True, out=out, seg_indptr=indptr) is out
    assert out[:, 3].tolist() == [SENTINEL, SENTINEL, 16, 16, SENTINEL, SENTINEL]


def test_eight_bits(device):
    x, weights = (drawn(*shape, dtype=torch.float8_e4m3fn, device=device) for shape in ((9, 64), (2, 64, 48)))
    lens = torch.tensor([4, 5], device=device)
    y = wrapper(device).run(x, weights, 2, False, seg_lens=lens)
    half = torch.empty(9, 48, dtype=torch.float16, device=device)
    wrapper(device).run(x, weights, 2, False, seg_lens=lens, out=half)
    parts = [product(rows.double(), weights[i].double().T) for i, rows in enumerate(x.split([4, 5]))]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    assert y.dtype == torch.bfloat16
    for got in (y, half):
        assert_product(got, want, magnitude, torch.float8_e4m3fn)


def test_mistakes(device):
    x, weights = torch.ones(6, 16, device=device), torch.ones(2, 16, 16, device=device)
    lens, out = torch.tensor([2, 4]), torch.full((6, 16), SENTINEL, device=device)
    run = wrapper(device).run
    for error, message, args, kwargs in (
        (ValueError, "seg_lens: got None, wanted seg_lens or seg_indptr", (x, weights, 2, True), {}),
        (ValueError, r"out: got shape \[5, 16\], wanted \[6, 16\]", (x, weights, 2, True, out[:5], lens), {}),
        (TypeError, "weights: got torch.float16, wanted torch.float32", (x, weights.half(), 2, True, out, lens), {}),
        (TypeError, "out: got torch.float16", (x, weights, 2, True, out.half(), lens), {}),
        (ValueError, r"weights: got shape \[2, 16, 8\], wanted \[2, 16, 16\]", (x, weights[:, :, :8], 2, True, out, lens), {}),
        (ValueError, "weights: got 1 matrices, wanted at least 2, one for each segment", (x, weights[:1], 2, True, out, lens), {}),
        (ValueError, r"seg_lens: got shape \[2\], wanted \[3\]", (x, weights, 3, True, out, lens), dict(weight_indices=torch.ones(3).int())),
        (TypeError, "seg_lens: got torch.float32", (x, weights, 2, True, out, lens.float()), {}),
        (ValueError, r"weight_indices: got shape \[1\], wanted \[2\]", (x, weights, 2, True, out, lens), dict(weight_indices=lens[:1])),
        (ValueError, "x: got 3 dimensions, wanted 2", (x[None], weights, 2, True, out, lens), {}),
        (TypeError, "batch_size: got '2', wanted an int", (x, weights, "2", True, out, lens), {}),
        (ValueError, "weights: got a tensor on meta, wanted one on", (x, weights.to("meta"), 2, True, out, lens), {}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            run(*args, **kwargs)
    tables = (
        ("seg_lens: got end 7 of group 1, wanted 2 to 6", dict(seg_lens=torch.tensor([2, 5]))),
        ("seg_lens: got end 4 of group 1, wanted 6 to 6", dict(seg_lens=torch.tensor([6, -2]))),
        ("seg_indptr: got end 3 of group 1, wanted 4 to 6", dict(seg_indptr=torch.tensor([0, 4, 3]))),
    )
    for message, table in tables if device == "cpu" else ():
        with pytest.raises(ValueError, match=f"^SegmentGEMMWrapper.run: {message}$"):
            run(x, weights, 2, True, out, **table)
    assert bool((out == SENTINEL).all())
    with pytest.raises(ValueError, match="backend: got 'other'"):
        SegmentGEMMWrapper(x, backend="other")
    with pytest.raises(TypeError, match="float_workspace_buffer: got NoneType"):
        SegmentGEMMWrapper(None)
