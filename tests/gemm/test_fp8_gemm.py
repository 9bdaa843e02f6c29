"""GEMM of fp8 matrices with scales, against float64 of the dequantised numbers."""

from __future__ import annotations

import pytest
import torch

from flashinfer import deep_gemm, gemm
from flashinfer.errors import GradientError
from flashinfer.gemm import (
    batch_deepgemm_fp8_nt_groupwise,
    bmm_fp8,
    fp8_blockscale_gemm_sm90,
    gemm_fp8_nt_blockscaled,
    gemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise_contiguous,
    pad_indptr_to_multiple_of_4,
)
from flashinfer.grouped_mm import grouped_mm_bf16

from .oracle import FP8, SENTINEL, assert_product, drawn, integers, product, scaled

E4M3 = torch.float8_e4m3fn


def scale_of(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(shape, device=device) + 0.25


def kept(scale: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the scales ``[..., rows, depth]`` in the layout of a mode."""
    return scale if mode == "K" else scale.transpose(-1, -2).contiguous()


@pytest.mark.parametrize("left", FP8)
@pytest.mark.parametrize("right", FP8)
@pytest.mark.parametrize("column_major", [True, False])
def test_bmm(left, right, column_major, dtype, device):
    a, b = drawn(4, 19, 72, dtype=left, device=device), drawn(4, 40, 72, dtype=right, device=device).transpose(1, 2)
    if not column_major:
        b = b.contiguous()
    a_scale, b_scale = scale_of(1, device=device), scale_of(device=device)
    out = torch.full((4, 19, 40), SENTINEL, dtype=dtype, device=device)
    assert bmm_fp8(a, b, a_scale, b_scale, dtype, out, "cublas") is out
    assert torch.equal(bmm_fp8(a, b, a_scale, b_scale, dtype), out)
    want, magnitude = product(a.double() * a_scale.double(), (b.double() * b_scale.double()).transpose(1, 2))
    assert_product(out, want, magnitude, E4M3)


@pytest.mark.parametrize("mode", ["MN", "K"])
@pytest.mark.parametrize("m, n, k", [(1, 128, 128), (4, 136, 256), (70, 72, 640), (131, 256, 160)])
@pytest.mark.parametrize("granularity", [(1, 128, 128), (128, 128, 128), (1, 1, 32)])
def test_groupwise(m, n, k, granularity, mode, device):
    gm, gn, gk = granularity
    a, b = drawn(m, k, dtype=E4M3, device=device), drawn(n, k, dtype=E4M3, device=device)
    a_scale = scale_of(-(-m // gm), -(-k // gk), device=device)
    b_scale = scale_of(-(-n // gn), -(-k // gk), device=device)
    want, magnitude = product(scaled(a, a_scale, (gm, gk)), scaled(b, b_scale, (gn, gk)))
    got = gemm_fp8_nt_groupwise(
        a, b, kept(a_scale, mode), kept(b_scale, mode), mode, 1, granularity, out_dtype=torch.float32
    )
    assert_product(got, want, magnitude, E4M3)
    if granularity == (128, 128, 128):
        same = gemm_fp8_nt_blockscaled(a, b, kept(a_scale, mode), kept(b_scale, mode), mode, out_dtype=torch.float32)
        assert torch.equal(same, got)


@pytest.mark.parametrize("mode", ["MN", "K"])
def test_groups(mode, device):
    """Pass the same groups as segments, as a matrix index per row with gaps, and as the first rows of a batch."""
    sizes, n, k, room = [5, 0, 33, 2], 136, 384, 40
    m, e = sum(sizes), len(sizes)
    a, b = drawn(m, k, dtype=E4M3, device=device), drawn(e, n, k, dtype=E4M3, device=device)
    a_scale, b_scale = scale_of(m, 3, device=device), scale_of(e, 2, 3, device=device)
    parts = [
        product(scaled(rows, scale, (1, 128)), scaled(b[g], b_scale[g], (128, 128)))
        for g, (rows, scale) in enumerate(zip(a.split(sizes), a_scale.split(sizes), strict=True))
    ]
    want, magnitude = (torch.cat(part) for part in zip(*parts, strict=True))
    indptr = torch.tensor([0, 5, 5, 38, 40], dtype=torch.int32, device=device)
    got = group_gemm_fp8_nt_groupwise(
        a, b, kept(a_scale, mode), kept(b_scale, mode), indptr, scale_major_mode=mode, out_dtype=torch.float32
    )
    assert_product(got, want, magnitude, E4M3)

    numbers = torch.tensor([i for g, size in enumerate(sizes) for i in [g] * size + [-1] * 3], device=device)
    here = numbers >= 0
    wide, wide_scale = a.new_zeros(len(numbers), k), a_scale.new_zeros(len(numbers), 3)
    wide[here], wide_scale[here] = a, a_scale
    out = torch.full((len(numbers), n), SENTINEL, device=device)
    group_deepgemm_fp8_nt_groupwise(wide, b, wide_scale, b_scale, numbers, out=out)
    assert torch.equal(out[here], got) and bool((out[~here] == SENTINEL).all())
    out.fill_(SENTINEL)
    same = group_gemm_fp8_nt_groupwise_contiguous(wide, b, wide_scale, b_scale, numbers, out=out)
    assert same is out and torch.equal(out[here], got) and bool((out[~here] == SENTINEL).all())
    half = torch.full((len(numbers), n), SENTINEL, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((wide, wide_scale), (b, b_scale), half, numbers)
    assert torch.equal(half[here], got.bfloat16()) and bool((half[~here] == SENTINEL).all())

    batch, batch_scale = a.new_zeros(e, room, k), a_scale.new_zeros(e, room, 3)
    for g, (rows, scale) in enumerate(zip(a.split(sizes), a_scale.split(sizes), strict=True)):
        batch[g, : sizes[g]], batch_scale[g, : sizes[g]] = rows, scale
    masked = torch.tensor(sizes, dtype=torch.int32, device=device)
    out = torch.full((e, room, n), SENTINEL, device=device)
    batch_deepgemm_fp8_nt_groupwise(batch, b, batch_scale, b_scale, masked, 10, out=out)
    assert torch.equal(torch.cat([out[g, :size] for g, size in enumerate(sizes)]), got)
    assert all(bool((out[g, size:] == SENTINEL).all()) for g, size in enumerate(sizes))
    again = torch.full_like(out, SENTINEL)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((batch, batch_scale), (b, b_scale), again, masked, 10)
    assert torch.equal(again, out)


def test_tables_are_checked_on_the_cpu():
    m, e, k = 20, 3, 128
    a, b = torch.ones(m, k).to(E4M3), torch.ones(e, 128, k).to(E4M3)
    a_scale, b_scale = torch.ones(m, 1), torch.ones(e, 1, 1)
    out = torch.full((m, 128), SENTINEL)
    for message, indptr in (
        ("m_indptr: got end 5 of group 1, wanted 7 to 20", [0, 7, 5, 18]),
        ("m_indptr: got end 50 of group 2, wanted 9 to 20", [0, 7, 9, 50]),
    ):
        with pytest.raises(ValueError, match=f"^group_gemm_fp8_nt_groupwise: {message}$"):
            group_gemm_fp8_nt_groupwise(
                a, b, a_scale, b_scale, torch.tensor(indptr), scale_major_mode="K", out=out, out_dtype=torch.float32
            )
        with pytest.raises(ValueError, match=f"^grouped_mm_bf16: {message}$"):
            grouped_mm_bf16(a.float(), b.float(), torch.tensor(indptr), out, torch.float32)
    for message, indices in (
        ("m_indices: got 7, wanted at most 2", [0] * 10 + [7] * 10),
        ("m_indices: got rows of 0 that lie apart", [0] * 10 + [2, 2] + [0] * 8),
        ("m_indices: got rows of 1 that lie apart", [-1] * 3 + [1] + [-1] * 15 + [1]),
    ):
        with pytest.raises(ValueError, match=f"^group_deepgemm_fp8_nt_groupwise: {message}"):
            group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, torch.tensor(indices), out=out)
        with pytest.raises(ValueError, match=f"^group_gemm_fp8_nt_groupwise_contiguous: {message}"):
            group_gemm_fp8_nt_groupwise_contiguous(a, b, a_scale, b_scale, torch.tensor(indices), out=out)
    batch = a[:18].view(3, 6, k), b, a_scale[:18].view(3, 6, 1), b_scale
    for count in (-1, 7):
        message = f"masked_m: got count {count} of group 1, wanted 0 to 6"
        with pytest.raises(ValueError, match=f"^batch_deepgemm_fp8_nt_groupwise: {message}$"):
            batch_deepgemm_fp8_nt_groupwise(*batch, torch.tensor([0, count, 2]), 2, out=out[:18].view(3, 6, 128))
    assert bool((out == SENTINEL).all())


@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("dtype", FP8)
def test_each_number_of_8_bits(dtype, rows, device):
    """Test each number in both operands, one per row of zeros. Few and many rows use different loads."""
    numbers = torch.arange(256, device=device, dtype=torch.uint8)
    k = int(torch.randint(33, 90, ()))
    alone = torch.zeros(256, k, device=device, dtype=torch.uint8)
    alone[torch.arange(256), torch.randint(0, k, (256,))] = numbers
    ones, one = torch.ones(rows, k, device=device).to(dtype), torch.ones((), device=device)
    want = numbers.view(dtype).float()
    for each in (alone[None].view(dtype), ones[None]):
        other = ones[None] if each.shape[1] == 256 else alone[None].view(dtype)
        got = bmm_fp8(each, other.transpose(1, 2), one, one, torch.float32)[0]
        got = got if each.shape[1] == 256 else got.T
        torch.testing.assert_close(got, want[:, None].expand(-1, rows), rtol=0, atol=0, equal_nan=True)


def test_scales_of_powers_of_two_are_exact(device):
    m, n, k = 67, 264, 2048
    a, b = integers(m, k, dtype=E4M3, device=device), integers(n, k, dtype=E4M3, device=device)
    a_scale, b_scale = (
        torch.exp2(torch.randint(-1, 2, shape, device=device).float()) for shape in ((m, k // 128), (3, k // 128))
    )
    got = gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out_dtype=torch.float32)
    want, _ = product(scaled(a, a_scale, (1, 128)), scaled(b, b_scale, (128, 128)))
    assert torch.equal(got.double(), want)
    half = torch.empty(m, n, dtype=torch.float16, device=device)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), half)
    assert torch.equal(half, want.half())


@pytest.mark.parametrize("by_row", [False, True])
def test_quantised_inside(by_row, device):
    x, weight = drawn(33, 256, dtype=torch.bfloat16, device=device), drawn(136, 256, dtype=E4M3, device=device)
    x[3] = 0
    scale = scale_of(136 if by_row else 2, 2, device=device)
    got = fp8_blockscale_gemm_sm90(x, weight, weight_scale=scale, out_dtype=torch.float32)
    want, magnitude = product(x.double(), scaled(weight, scale, (1 if by_row else 128, 128)))
    assert bool(((got - want).abs() <= 2**-4 * magnitude + 1e-6).all())  # half a step of three bits
    assert bool((got[3] == 0).all())
    q = drawn(33, 256, dtype=E4M3, device=device)
    q_scale = scale_of(33, 2, device=device)
    got = fp8_blockscale_gemm_sm90(q, weight, q_scale, scale)
    assert torch.equal(fp8_blockscale_gemm_sm90(q, weight, q_scale.T.contiguous(), scale), got)
    want, magnitude = product(scaled(q, q_scale, (1, 128)), scaled(weight, scale, (1 if by_row else 128, 128)))
    assert_product(got, want, magnitude, E4M3)
    both = fp8_blockscale_gemm_sm90(x, x[:16])
    assert torch.nn.functional.cosine_similarity(both.float().flatten(), (x @ x[:16].T).float().flatten(), 0) > 0.99


def test_mistakes(device):
    a, b = torch.ones(4, 256, device=device).to(E4M3), torch.ones(128, 256, device=device).to(E4M3)
    a_scale, b_scale = torch.ones(4, 2, device=device), torch.ones(1, 2, device=device)
    out = torch.full((4, 128), SENTINEL, device=device)

    def call(x=a, y=b, x_scale=a_scale, y_scale=b_scale, mode="K", mma_sm=1, granularity=(1, 128, 128), **more):
        return gemm_fp8_nt_groupwise(x, y, x_scale, y_scale, mode, mma_sm, granularity, out, **more)

    for error, message, change in (
        (ValueError, "scale_major_mode: got 'N', wanted 'MN' or 'K'", dict(mode="N")),
        (ValueError, "mma_sm: got 3, wanted 1 or 2", dict(mma_sm=3)),
        (ValueError, "scale_granularity_mnk: got", dict(granularity=(1, 0, 128))),
        (ValueError, "scale_granularity_mnk: got 5, wanted three positive numbers", dict(granularity=5)),
        (ValueError, "scale_granularity_mnk: got", dict(granularity=(1, 128))),
        (ValueError, r"a_scale: got shape \[4, 2\], wanted \[2, 4\]", dict(mode="MN", y_scale=b_scale.T)),
        (ValueError, r"b_scale: got shape \[1, 1\], wanted \[1, 2\]", dict(y_scale=b_scale[:, :1])),
        (ValueError, r"b: got shape \[\d+, 128\], wanted \[128, 256\]", dict(y=b[:, :128])),
        (ValueError, "a: got 3 dimensions, wanted 2", dict(x=a[None])),
        (TypeError, "a_scale: got torch.float64", dict(x_scale=a_scale.double())),
        (TypeError, "a: got torch.bfloat16", dict(x=a.bfloat16())),
        (TypeError, "out: got torch.float32, wanted torch.float16", dict(out_dtype=torch.float16)),
    ):
        with pytest.raises(error, match=message):
            call(**change)
    assert bool((out == SENTINEL).all())
    one = torch.ones(1, device=device)
    for error, message, args in (
        (ValueError, "A_scale: got 2 elements, wanted 1", (a[None], b.T[None], a_scale[0], one, torch.float16)),
        (TypeError, "dtype: got torch.int8", (a[None], b.T[None], one, one, torch.int8)),
        (TypeError, "B: got torch.float32", (a[None], b.T[None].float(), one, one, torch.float16)),
        (
            ValueError,
            r"B: got shape \[2, 256, 128\], wanted \[1, 256, any\]",
            (a[None], b.T[None].expand(2, -1, -1), one, one, torch.float16),
        ),
    ):
        with pytest.raises(error, match=message):
            bmm_fp8(*args)
    for error, message, args in (
        (ValueError, "divisible by block size", (a[:, :96].bfloat16(), b[:, :96])),
        (ValueError, "input: got torch.float16, wanted FP8.*or BF16", (a.half(), b.half())),
        (ValueError, "weight: got torch.float32, wanted FP8.*or BF16", (a.bfloat16(), b.float())),
        (ValueError, "weight_scale: got None.*weight_scale is required when weight is FP8", (a.bfloat16(), b)),
        (ValueError, "input_scale should not be provided for BF16", (a.bfloat16(), b, a_scale)),
        (ValueError, "FP8 input with BF16 weight is not supported", (a, b.bfloat16(), a_scale)),
        (TypeError, "weight_scale: got float, wanted Tensor", (a.bfloat16(), b, None, 1.0)),
        (TypeError, "input_scale: got torch.float16", (a, b, a_scale.half(), b_scale)),
        (ValueError, r"input_scale: got shape \[1, 2\], wanted \[4, 2\]", (a, b, b_scale, b_scale)),
        (
            ValueError,
            r"weight_scale: got shape \[3, 2\], wanted \[128, 2\] or \[1, 2\]",
            (a, b, a_scale, torch.ones(3, 2, device=device)),
        ),
    ):
        with pytest.raises(error, match=message):
            fp8_blockscale_gemm_sm90(*args)
    with pytest.raises(GradientError):
        fp8_blockscale_gemm_sm90(a.bfloat16().requires_grad_(), b.bfloat16())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("counts", [[5, 0, 33, 4, 1], [0], [], [3, 2]], ids=str)
def test_numbers_of_rows_rounded_up_to_multiples_of_four(counts, index_dtype, device):
    bounds = torch.tensor([0, *counts], device=device).cumsum(0).to(index_dtype)
    apart = torch.stack([bounds, bounds], 1)[:, 0]  # with strides
    padded, ranks = pad_indptr_to_multiple_of_4(apart)
    rounded = [(count + 3) // 4 * 4 for count in counts]
    want = torch.tensor([0, *rounded]).cumsum(0)
    assert padded.dtype == ranks.dtype == torch.int32 and padded.device.type == ranks.device.type == device
    assert padded.tolist() == want.tolist()
    places = [int(start) + i for start, count in zip(want, counts, strict=False) for i in range(count)]
    assert ranks.tolist() == places
    for kind, text, mistake in (
        (TypeError, "got torch.float32", torch.zeros(3, device=device)),
        (ValueError, r"got shape \[2, 2\], wanted a vector", torch.zeros(2, 2, dtype=torch.int32, device=device)),
        (ValueError, "got 0 elements, wanted at least 1", torch.zeros(0, dtype=torch.int32, device=device)),
        (ValueError, r"got \[1, 2\], wanted offsets that rise from 0", torch.tensor([1, 2])),
        (ValueError, r"got \[0, 5, 3\], wanted offsets", torch.tensor([0, 5, 3])),
    ):
        with pytest.raises(kind, match=f"pad_indptr_to_multiple_of_4: m_indptr: {text}"):
            pad_indptr_to_multiple_of_4(mistake)


def test_the_module_of_sm100_is_that_of_all_gpus():
    assert gemm.gen_gemm_sm100_module() == gemm.gen_gemm_module("cuda") == gemm.gen_gemm_sm90_module()
