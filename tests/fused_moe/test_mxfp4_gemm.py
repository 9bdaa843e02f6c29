"""Experts with weights in MXFP4: helpers, layouts, the product, and the layer, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.fused_moe import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    dequantize_mxfp4,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    quantize_mxfp4,
)
from flashinfer.mxfp4_gemm import mxfp4_gemm

from ..conftest import no_synchronisation
from .test_experts import check, check_replays, layer, oracle
from .test_fused_moe import ROUNDING

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES += [-one for one in VALUES]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def half(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def interleaved(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = interleave_moe_weights_for_sm90_mixed_gemm(codes)
    return weight, interleave_moe_scales_for_sm90_mixed_gemm(scales)


def random_weight(device: str, *shape: int, scales: tuple[int, int] = (118, 126)) -> tuple[torch.Tensor, ...]:
    """Return codes and scales in their plain form, and the weight in float64."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device=device)
    factors = torch.randint(*scales, (*rows, k // 32), dtype=torch.uint8, device=device)
    return codes, factors, dequantize_mxfp4(codes, factors, torch.float64)


def experts_of(device: str, dtype: torch.dtype, tokens: int, top_k: int, experts: int, hidden: int, inner: int):
    """Return input, experts, weights, and of each matrix the kernels' form and the float64 weight."""
    x, ids, scales, _, _ = layer(device, dtype, tokens, top_k, experts, 8, 8)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    first = random_weight(device, experts, 2 * inner, hidden, scales=(117, 121))
    second = random_weight(device, experts, hidden, inner, scales=(117, 121))
    return x, ids, scales, first, second


def moe(x, ids, scales, first, second, dtype, **other: Any) -> torch.Tensor:
    (one, by_one), (two, by_two) = (interleaved(*one[:2]) for one in (first, second))
    given = dict(quant_scales=[by_one, by_two], use_w4_group_scaling=True, use_mxfp8_act_scaling=False)
    return cutlass_fused_moe(x, ids, scales, one, two, dtype, **{**given, **other})[0]


def test_all_codes_with_all_scales(device):
    codes = torch.arange(256, device=device).to(torch.uint8).view(16, 16).repeat_interleave(2, 0)
    scales = torch.randint(0, 255, (32, 1), dtype=torch.uint8, device=device)
    scales[:4, 0] = torch.tensor([0, 1, 254, 127], dtype=torch.uint8)
    weight = dequantize_mxfp4(codes, scales, torch.float64)
    assert weight.shape == (32, 32) and weight.dtype == torch.float64
    for row in range(32):
        for byte in range(16):
            value = row // 2 * 16 + byte
            want = [VALUES[value & 15], VALUES[value >> 4]]
            scale = 2.0 ** (int(scales[row, 0]) - 127)
            assert weight[row, 2 * byte : 2 * byte + 2].tolist() == [one * scale for one in want]
    assert dequantize_mxfp4(codes, torch.full_like(scales, 255)).isnan().all()


def test_quantised_weights_are_the_nearest(device, dtype):
    weight = (torch.randn(5, 3, 96, device=device) * torch.logspace(-20, 4, 5, device=device).view(5, 1, 1)).to(dtype)
    weight[0, 0, :32] = 0
    codes, scales = quantize_mxfp4(weight)
    assert codes.shape == (5, 3, 48) and scales.shape == (5, 3, 3) and codes.dtype == scales.dtype == torch.uint8
    got = dequantize_mxfp4(codes, scales)
    groups, got = (one.cpu().double().unflatten(-1, (-1, 32)) for one in (weight, got))
    # Exact in float64: CUDA's power function may be off by an ulp, so the oracle stays on the CPU and looks powers up.
    factors = torch.tensor([math.ldexp(1, e - 127) for e in range(255)], dtype=torch.float64)[scales.cpu().long()]
    largest = groups.abs().amax(-1)
    large = largest > 2.0**-124
    assert ((4 * factors <= largest) & (largest < 8 * factors))[large].all() and not scales.cpu()[largest == 0].any()
    table = torch.tensor(VALUES, dtype=torch.float64) * factors[..., None]
    nearest = (groups[..., None] - table[..., None, :]).abs().amin(-1)
    assert (got - groups).abs().equal(nearest)
    ties = torch.tensor([[5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5.0, 7.0, 6.0] + [0.0] * 22], device=device)
    assert dequantize_mxfp4(*quantize_mxfp4(ties))[0, :10].tolist() == [4, 4, 2, 2, 1, 1, 0, -4, 6, 6]
    ties[0, 31] = torch.inf
    assert dequantize_mxfp4(*quantize_mxfp4(ties)).isnan().all()


def test_interleaved_forms(device):
    """Look up bits and bytes one by one."""
    codes, scales, _ = random_weight(device, 2, 128, 256)
    weight, blocks = interleaved(codes, scales)
    assert weight.shape == codes.shape and weight.dtype == torch.uint8 and weight.is_contiguous()
    assert blocks.shape == (2, 2, 2, 16, 16) and blocks.is_contiguous()
    bits = {0: (15, 8, 7, 6), 1: (12, 5, 4, 3), 2: (9, 2, 1, 0), 3: (14, 13, 11, 10)}
    for e, n, word in torch.cartesian_prod(torch.arange(2), torch.randint(0, 128, (5,)), torch.randint(0, 32, (5,))):
        plain = [int(byte) >> 4 * i & 15 for byte in codes[e, n, 4 * word : 4 * word + 4] for i in (0, 1)]
        got = sum(int(byte) << 8 * i for i, byte in enumerate(weight[e, n, 4 * word : 4 * word + 4]))
        for element, code in enumerate(plain):
            places = [one + 16 * (element % 2) for one in bits[element // 2]]
            assert [got >> place & 1 for place in places] == [code >> i & 1 for i in (3, 2, 1, 0)]
    flat = blocks.view(2, 2, 2, 64, 4)
    for e, n, group in ((0, 0, 0), (1, 127, 7), (0, 70, 3), (1, 5, 4)):
        assert flat[e, n // 64, group // 4, n % 64, group % 4] == scales[e, n, group]
    assert interleaved(codes[:, ::2], scales[:, ::2])[0].equal(weight[:, ::2])  # strided


@pytest.mark.parametrize("counts", [[1], [0, 3, 5, 0], [9, 1], [40, 0, 3], [70, 65], [129, 3]], ids=str)
def test_product(counts, device, half):
    """Compare all tiles with float64."""
    for n, k, bounds in ((64, 128, (100, 128)), (192, 384, (60, 190) if half == torch.bfloat16 else (110, 120))):
        codes, scales, weight = random_weight(device, len(counts), n, k, scales=bounds)
        rows = sum(counts)
        a = torch.randn(rows + 3, k + 8, device=device).to(half)[:, :k]
        chosen = torch.randperm(rows + 3, device=device)[:rows].int()
        indptr = torch.tensor([0, *counts], device=device).cumsum(0).int()
        indices, b = torch.cat([chosen, chosen[:1], chosen[:1]]), interleaved(codes, scales)
        out = torch.full((rows + 2, n), 77.0, device=device, dtype=half)
        with no_synchronisation(device):
            mxfp4_gemm(out, a, *b, indptr, indices)
        assert (out[rows:] == 77).all()  # rows after the last group
        expert = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        picked = a[chosen.long()].double()
        want = torch.einsum("rk,rnk->rn", picked, weight[expert])
        size = torch.einsum("rk,rnk->rn", picked.square(), weight[expert].square()).sqrt()
        error = (out[:rows].double() - want).abs()
        least = torch.finfo(half).smallest_normal * ROUNDING[half]
        assert (error <= 1.01 * ROUNDING[half] * want.abs() + 2**-17 * size + least).all()


def test_integers_are_exact(device, half):
    """Products of one-hot rows are the weights, for every code at every place and every scale that fits."""
    codes, scales, weight = random_weight(device, 2, 128, 256, scales=(115, 139))
    a = torch.eye(256, device=device).to(half).repeat(2, 1)
    out = torch.empty(512, 128, dtype=half, device=device)
    indptr = torch.tensor([0, 256, 512], dtype=torch.int32, device=device)
    mxfp4_gemm(out, a, *interleaved(codes, scales), indptr, None)
    assert out.view(2, 256, 128).mT.double().equal(weight)


def test_special_scales(device):
    """A scale of 255 is NaN for its row of the weight only; the largest and smallest scales are exact."""
    codes, scales, _ = random_weight(device, 1, 64, 128)
    scales[0, 5, 1], scales[0, 7], scales[0, 9] = 255, 20, 240
    a = torch.randn(20, 128, device=device).bfloat16()
    out = torch.empty(20, 64, dtype=torch.bfloat16, device=device)
    mxfp4_gemm(out, a, *interleaved(codes, scales), torch.tensor([0, 20], dtype=torch.int32, device=device), None)
    others = torch.arange(64, device=device) != 5
    want = (a.double() @ dequantize_mxfp4(codes, scales, torch.float64)[0].T)[:, others]
    size = want.abs().amax(0)
    assert out[:, 5].isnan().all() and not out[:, others].isnan().any()
    assert ((out[:, others].double() - want).abs() <= 2**-7 * size).all()


def test_experts(device, half):
    for tokens, top_k, experts, hidden, inner in (
        (1, 1, 1, 128, 128),
        (3, 2, 8, 256, 128),
        (70, 4, 6, 128, 256),
        (150, 2, 2, 128, 128),
        (0, 2, 4, 128, 128),
    ):
        x, ids, scales, first, second = experts_of(device, half, tokens, top_k, experts, hidden, inner)
        out = torch.full((tokens + 2, hidden), 77.0, device=device, dtype=half)
        got = moe(x, ids, scales, first, second, half, output=out[1:-1])
        assert got.data_ptr() == out[1:-1].data_ptr() and (out[[0, -1]] == 77).all()
        check(got, *oracle(x, ids, scales, first[2], second[2]), half)


def test_biases_and_numbers_of_gpt_oss(device, half):
    """Pass biases of 16 bits, alpha 1.702, beta 1 and limit 7, and scales as bytes and as words."""
    x, ids, scales, first, second = experts_of(device, half, 30, 4, 5, 128, 256)
    x *= 8  # some gates exceed the limit
    biases = torch.randn(5, 512, device=device).to(half), torch.randn(5, 128, device=device).to(half)
    numbers = [torch.full((5,), one, device=device) for one in (1.702, 1.0, 7.0)]
    (one, by_one), (two, by_two) = (interleaved(*one[:2]) for one in (first, second))
    names = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), numbers, strict=True))
    results = [
        cutlass_fused_moe(
            x, ids, scales, one, two, torch.float32, by, *biases, use_w4_group_scaling=True, tune_max_num_tokens=64,
            **names,
        )[0]
        for by in ([by_one, by_two], [by_one.view(torch.int32), by_two.view(torch.int32)])
    ]  # fmt: skip
    assert results[0].equal(results[1])
    want, size = oracle(x, ids, scales, first[2], second[2], biases=biases, numbers=numbers)
    check(results[0], want, size + 1, half)


def test_ranks_add_up(device):
    x, ids, scales, first, second = experts_of(device, torch.float16, 33, 3, 8, 128, 256)
    want, size = oracle(x, ids, scales, first[2], second[2])
    total = torch.zeros(33, 128, device=device)
    for ep in range(4):
        for tp in range(2):
            mine, rows = slice(2 * ep, 2 * ep + 2), slice(128 * tp, 128 * tp + 128)
            half = [torch.cat([one[mine, :256][:, rows], one[mine, 256:][:, rows]], 1) for one in first[:2]]
            part = [second[0][mine][:, :, 64 * tp : 64 * tp + 64], second[1][mine][:, :, 4 * tp : 4 * tp + 4]]
            total += moe(x, ids, scales, half, part, torch.float32, ep_size=4, ep_rank=ep, tp_size=2, tp_rank=tp)
    check(total, want, size, torch.float16, 32)
    assert not moe(x, ids * 0 - 1, scales, first, second, torch.float32).any()


def test_rows_depend_on_no_other_row(device, half):
    x, ids, scales, first, second = experts_of(device, half, 90, 2, 4, 128, 128)
    ids[:50] = 2
    whole = moe(x, ids, scales, first, second, half)
    order = torch.randperm(90, device=device)
    assert moe(x[order], ids[order], scales[order], first, second, half).equal(whole[order])
    for few in (1, 7, 30):  # another tile
        assert moe(x[:few], ids[:few], scales[:few], first, second, half).equal(whole[:few])
    x[7], x[8] = torch.nan, torch.inf
    other = moe(x, ids, scales, first, second, half)
    rows = (torch.arange(90, device=device) != 7) & (torch.arange(90, device=device) != 8)
    assert other[7].isnan().all() and not other[8].isfinite().any() and other[rows].equal(whole[rows])


def test_one_expert_with_all_tokens(device, half):
    x, ids, scales, first, second = experts_of(device, half, 60, 1, 6, 128, 128)
    ids.fill_(4)
    check(moe(x, ids, scales, first, second, half), *oracle(x, ids, scales, first[2], second[2]), half)


def test_a_workspace_of_the_caller(device):
    x, ids, scales, first, second = experts_of(device, torch.bfloat16, 20, 3, 6, 128, 256)
    size = cutlass_fused_moe_workspace_size(
        20, 128, 256, 6, 3, x_dtype=torch.bfloat16, weight_dtype=torch.uint8, use_w4_group_scaling=True
    )
    assert size == 60 * (512 + 256 + 128) * 2
    buffer = torch.full((size + 256,), 77, dtype=torch.uint8, device=device)
    got = moe(x, ids, scales, first, second, torch.bfloat16, workspace_buffer=buffer[128:-128])
    assert got.equal(moe(x, ids, scales, first, second, torch.bfloat16))
    assert (buffer[:128] == 77).all() and (buffer[-128:] == 77).all() and (buffer[128:-128] != 77).any()
    with pytest.raises(ValueError, match=f"workspace_buffer: got {size - 1} bytes, wanted at least {size}"):
        moe(x, ids, scales, first, second, torch.bfloat16, workspace_buffer=buffer[: size - 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_other_routings():
    x, ids, scales, first, second = experts_of("cuda", torch.bfloat16, 64, 4, 16, 256, 128)
    (one, by_one), (two, by_two) = (interleaved(*one[:2]) for one in (first, second))

    def call(to: torch.Tensor | None) -> torch.Tensor:
        return cutlass_fused_moe(
            x, ids, scales, one, two, x.dtype, [by_one, by_two], use_w4_group_scaling=True, output=to
        )[0]

    check_replays(call, x, ids)


def test_invalid_arguments(device):
    x, ids, scales, first, second = experts_of(device, torch.float16, 4, 2, 3, 128, 128)
    (one, by_one), (two, by_two) = (interleaved(*one[:2]) for one in (first, second))

    def refused(kind: type[Exception], text: str, *places: Any, **other: Any) -> None:
        given: list[Any] = [x, ids, scales, one, two, torch.float16, [by_one, by_two]]
        for place, value in places:
            given[place] = value
        out = torch.full((4, 128), 77, dtype=given[5], device=device)
        with pytest.raises(kind, match=f"cutlass_fused_moe: {text}"):
            cutlass_fused_moe(*given, **{**dict(use_w4_group_scaling=True, output=out), **other})
        assert (out == 77).all()

    refused(UnsupportedError, "fc1_expert_weights: .*or MXFP4 with use_w4_group_scaling", use_w4_group_scaling=False)
    refused(TypeError, "input: got torch.float32, wanted torch.float16 or torch.bfloat16", (0, x.float()))
    refused(TypeError, "fc1_expert_weights: got torch.float16, wanted torch.uint8", (3, one.half()))
    refused(TypeError, "fc2_expert_weights: got torch.int8, wanted torch.uint8", (4, two.view(torch.int8)))
    refused(ValueError, r"fc1_expert_weights: got shape \[3, 256, 32\]", (3, one[:, :, :32]))
    refused(ValueError, "fc1_expert_weights: got shape .*3, 192", (3, one[:, :192]))
    refused(ValueError, "fc2_expert_weights: got rows of 64 elements, wanted a multiple of 128", (4, two[:, :, :32]))
    refused(ValueError, "fc1_expert_weights: got rows of 96 elements", (0, x[:, :96]), (3, one[:, :, :48]),
            (4, two[:, :96]), output=None)  # fmt: skip
    refused(ValueError, "quant_scales: got 1 tensors, wanted 2", (6, [by_one]))
    refused(ValueError, "quant_scales: got 0 tensors, wanted 2", (6, None))
    refused(TypeError, r"quant_scales\[1\]: got float, wanted Tensor", (6, [by_one, 1.0]))
    refused(TypeError, r"quant_scales\[0\]: got torch.float32", (6, [by_one.float(), by_two]))
    refused(ValueError, r"quant_scales\[0\]: got 3 dimensions, wanted 5", (6, [first[1], by_two]))
    refused(ValueError, r"quant_scales\[1\]: got shape \[3, 4, 1", (6, [by_one, by_one]))
    refused(GradientError, "has no gradient", (0, x.clone().requires_grad_()))
    bf16 = x.bfloat16()
    with pytest.raises(TypeError, match="mxfp4_gemm: out: got float16, wanted bfloat16 as a has"):
        mxfp4_gemm(x.new_empty(8, 256), bf16, one, by_one, ids[0].new_zeros(4), ids.flatten())


def test_invalid_operands_of_the_product(device):
    codes, scales, _ = random_weight(device, 2, 64, 128)
    b, by_b = interleaved(codes, scales)
    a, indptr = torch.randn(5, 128, device=device).half(), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    out = torch.full((5, 64), 77, dtype=torch.float16, device=device)
    good: dict[str, Any] = dict(out=out, a=a, b=b, b_scale=by_b, m_indptr=indptr, a_rows=None)
    for kind, text, other in (
        (TypeError, "a: got float32", dict(a=a.float(), out=out.float())),
        (TypeError, "b: got int8, wanted uint8", dict(b=b.view(torch.int8))),
        (TypeError, "b_scale: got int8, wanted uint8", dict(b_scale=by_b.view(torch.int8))),
        (TypeError, "m_indptr: got int64, wanted int32", dict(m_indptr=indptr.long())),
        (ValueError, "m_indptr: got shape", dict(m_indptr=indptr[:2])),
        (ValueError, "a: got 96 elements in a row, wanted a multiple of 128", dict(a=a[:, :96])),
        (ValueError, "b: got 32 rows of a matrix, wanted a multiple of 64", dict(b=b[:, :32].contiguous())),
        (ValueError, "b: got shape", dict(b=b[:, :, :32].contiguous())),
        (ValueError, "b: is not contiguous", dict(b=torch.cat([b, b], 2)[:, :, :64])),
        (ValueError, "b_scale: got shape", dict(b_scale=by_b[:1])),
        (ValueError, "out: got shape", dict(out=out[:, :32])),
        (ValueError, "a: got 4 rows, wanted 5 as out has", dict(a=a[:4])),
        (ValueError, "a_rows: got shape", dict(a_rows=indptr)),
        (ValueError, "a: got stride 2", dict(a=torch.cat([a, a], 1)[:, ::2])),
    ):
        with pytest.raises(kind, match=f"mxfp4_gemm: {text}"):
            mxfp4_gemm(*{**good, **other}.values())
        assert (out == 77).all()
    if device != "cpu":
        with pytest.raises(ValueError, match="a: got rows that do not start at multiples of 16 bytes"):
            mxfp4_gemm(*{**good, "a": torch.cat([a, a[:, :1]], 1)[:, :128]}.values())


def test_helpers_refuse(device):
    weight = torch.randn(2, 64, 128, device=device)
    codes, scales = quantize_mxfp4(weight)
    names = "interleave_moe_weights_for_sm90_mixed_gemm", "interleave_moe_scales_for_sm90_mixed_gemm"
    for kind, text, call in (
        (ValueError, "quantize_mxfp4: weight: got 48 elements in a row", lambda: quantize_mxfp4(weight[..., :48])),
        (TypeError, "quantize_mxfp4: weight: got torch.uint8", lambda: quantize_mxfp4(codes)),
        (TypeError, "quantize_mxfp4: weight: got int, wanted Tensor", lambda: quantize_mxfp4(1)),
        (TypeError, "dequantize_mxfp4: codes: got torch.float32", lambda: dequantize_mxfp4(weight, scales)),
        (ValueError, "dequantize_mxfp4: codes: got 8 bytes", lambda: dequantize_mxfp4(codes[..., :8], scales)),
        (ValueError, "dequantize_mxfp4: scales: got shape", lambda: dequantize_mxfp4(codes, scales[:1])),
        (UnsupportedError, f"{names[0]}: quant_type: got 'int4'", lambda: interleaved_weight(codes, "int4")),
        (ValueError, f"{names[0]}: weight: got 2 dimensions", lambda: interleaved_weight(codes[0])),
        (ValueError, f"{names[0]}: weight: got 48 bytes in a row", lambda: interleaved_weight(codes[..., :48])),
        (TypeError, f"{names[0]}: weight: got torch.float32", lambda: interleaved_weight(weight)),
        (UnsupportedError, f"{names[1]}: group_size: got 128", lambda: interleaved_scale(scales, 128)),
        (ValueError, f"{names[1]}: scales: got 32 rows", lambda: interleaved_scale(scales[:, :32])),
        (ValueError, f"{names[1]}: scales: got 3 scales in a row", lambda: interleaved_scale(scales[..., :3])),
        (TypeError, f"{names[1]}: scales: got torch.float32", lambda: interleaved_scale(scales.float())),
    ):
        with pytest.raises(kind, match=text):
            call()


interleaved_weight = interleave_moe_weights_for_sm90_mixed_gemm
interleaved_scale = interleave_moe_scales_for_sm90_mixed_gemm
