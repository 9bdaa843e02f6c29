"""Quantisation of groups to 8 bits against float64: scales and their layouts, numbers, and errors."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError
from flashinfer.group_quant import per_token_group_quant_8bit

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}


def check(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group: int, eps: float = 1e-10) -> None:
    """Check the scale of each group, and that each number is nearest to its quotient."""
    parts = x.cpu().double().unflatten(-1, (-1, group))
    want = parts.abs().amax(-1).clamp(min=torch.tensor(eps, dtype=torch.float32).double()) / LARGEST[q.dtype]
    assert scale.dtype == torch.float32 and scale.shape == want.shape
    got = scale.cpu().double()
    assert ((got - want).abs() <= 2e-7 * want).all()
    check_numbers(parts, q, got)


def check_numbers(parts: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    quotient, near = parts / scale[..., None], 1e-6 * LARGEST[q.dtype]
    numbers = q.cpu().double().unflatten(-1, parts.shape[-2:])
    if q.dtype == torch.int8:
        half = torch.full_like(quotient, 0.5)
    else:  # half a step: 2^-4 of the power of two below, and 2^-10 at the bottom
        half = torch.exp2(torch.floor(torch.log2(quotient.abs().clamp(min=2**-6)))) * 2**-4
    assert ((numbers - quotient).abs() <= half + near).all()
    assert bool((numbers.abs() <= LARGEST[q.dtype]).all())


@pytest.mark.parametrize("group", [1, 7, 16, 32, 48, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("to", [E4M3, torch.int8], ids=str)
def test_groups_of_any_size(group, to, dtype, device):
    x = (torch.randn(37, 3 * group, device=device) * torch.rand(37, 1, device=device).exp2()).to(dtype)
    x[5] = 0
    x[6, :group] *= 1e-3
    q, scale = per_token_group_quant_8bit(x, group, dst_dtype=to)
    assert q.dtype == to and q.shape == x.shape and q.is_contiguous() and scale.is_contiguous()
    check(x, q, scale, group)
    assert not q[5].float().any()
    assert flashinfer.quantization.per_token_group_quant_8bit is per_token_group_quant_8bit


def test_defaults_and_a_least_maximum(device):
    x = torch.randn(4, 256, device=device).half() * 1e-3
    q, scale = per_token_group_quant_8bit(x, 128)
    assert q.dtype == E4M3
    check(x, q, scale, 128)
    q, scale = per_token_group_quant_8bit(x, 128, eps=0.5)
    check(x, q, scale, 128, eps=0.5)
    assert (scale == 0.5 / 448).all()


@pytest.mark.parametrize("shape", [(130, 512), (3, 5, 256), (2, 3, 4, 128), (512,), (0, 256), (3, 0, 256), (7, 0)])
@pytest.mark.parametrize("aligned", [False, True])
def test_layouts_of_scales(shape, aligned, device):
    """Scales are contiguous over tokens, and the stride of groups is a multiple of four on request."""
    x = torch.randn(shape, device=device).bfloat16()
    plain, rows = per_token_group_quant_8bit(x, 128)
    q, scale = per_token_group_quant_8bit(x, 128, column_major_scales=True, scale_tma_aligned=aligned)
    assert q.shape == x.shape and q.view(torch.uint8).equal(plain.view(torch.uint8))
    assert scale.shape == (*shape[:-1], shape[-1] // 128) and scale.equal(rows)
    tokens, groups = x[..., 0].numel() if shape[-1] else 0, shape[-1] // 128
    if tokens > 1 and groups > 1:
        flat = scale.reshape(tokens, groups) if len(shape) == 2 else scale.flatten(0, -2)
        assert flat.data_ptr() == scale.data_ptr()
        assert flat.stride() == (1, (tokens + 3) // 4 * 4 if aligned else tokens)


@pytest.mark.parametrize("group", [48, 128])
def test_powers_of_two(group, device):
    """A scale is the least power of two that is not below the quotient. A power of two stays."""
    x = torch.randn(64, 2 * group, device=device)
    x[0] = 448 * 2**-5
    _, exact = per_token_group_quant_8bit(x, group)
    q, scale = per_token_group_quant_8bit(x, group, scale_ue8m0=True)
    mantissa, _ = torch.frexp(scale.cpu())
    assert (mantissa == 0.5).all() and bool((scale >= exact).all()) and bool((scale < 2 * exact).all())
    assert (scale[0] == 2**-5).all()
    check_numbers(x.cpu().double().unflatten(-1, (-1, group)), q, scale.cpu().double())


def test_numbers_that_are_not_finite(device):
    x = torch.ones(3, 128, device=device)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    q, scale = per_token_group_quant_8bit(x, 64)
    values = q.float().cpu()
    assert values[0, 3].isnan() and (values[0, :3] == 448).all() and scale[0, 0] == 1 / 448
    assert values[1, 5].isnan() and values[2, 7].isnan() and not values[1, :5].any()
    assert (values[:, 64:] == 448).all()
    eight, _ = per_token_group_quant_8bit(x, 64, dst_dtype=torch.int8)
    assert eight[0, 3] == 0 and eight[0, 0] == 127


@pytest.mark.parametrize("group", [64, 100])
def test_strides(group, device):
    """Rows of a larger matrix, rows whose start is not aligned, and a transposed matrix."""
    whole = torch.randn(9, 4 * group + 3, device=device).half()
    for x in (whole[:, : 2 * group], whole[:, 1 : 1 + 2 * group], whole.t()[: 2 * group, :].t(), whole[::2, :group]):
        got, want = per_token_group_quant_8bit(x, group), per_token_group_quant_8bit(x.contiguous(), group)
        check(x, *got, group)
        assert got[1].equal(want[1]) and got[0].view(torch.uint8).equal(want[0].view(torch.uint8))


def test_bad_arguments(device):
    x = torch.ones(4, 256, device=device)
    for error, message, given in (
        (ValueError, "group_size: got 100, wanted a divisor of x's last dimension, 256", dict(group_size=100)),
        (ValueError, "group_size: got 0", dict(group_size=0)),
        (ValueError, "eps: got 0.0, wanted a positive number", dict(eps=0.0)),
        (ValueError, "eps: got .*wanted a positive number, at least 1e-35", dict(eps=1e-37)),
        (ValueError, "scale_tma_aligned: got True, wanted False without", dict(scale_tma_aligned=True)),
        (ValueError, "backend: got 'triton'", dict(backend="triton")),
        (TypeError, "dst_dtype: got torch.float8_e5m2", dict(dst_dtype=torch.float8_e5m2)),
        (TypeError, "x: got list, wanted Tensor", dict(x=[1.0])),
        (TypeError, "x: got int32", dict(x=x.int())),
        (ValueError, "x: got 0 dimensions", dict(x=x.sum())),
        (GradientError, "has no gradient", dict(x=x.clone().requires_grad_())),
    ):
        with pytest.raises(error, match=message):
            per_token_group_quant_8bit(**dict(x=x, group_size=128) | given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_quantises_other_numbers():
    x = torch.randn(33, 1024, device="cuda").bfloat16()
    per_token_group_quant_8bit(x, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = per_token_group_quant_8bit(x, 128)
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    check(x, q, scale, 128)
