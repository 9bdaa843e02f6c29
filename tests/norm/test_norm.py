"""The norm family against float64."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..support.oracle import Guarded, assert_close, filled, max_ulps

SHAPES = [
    (1, 1),
    (3, 5),
    (7, 128),
    (2, 3, 64),
    (5, 1000),
    (4, 4096),
    (3, 8192),
    (1, 40000),
    (33, 257),
    (0, 64),
    (3, 4, 0),
    (9,),
]


def limit_of(dtype: torch.dtype, sums: int) -> float:
    """Return the error bound. In float32 the sums x + residual and weight + 1 are rounded too."""
    return max_ulps(dtype) + (2 * sums if dtype == torch.float32 else 0)


def rms_norm_oracle(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize(
    "function, offset", [(flashinfer.rmsnorm, 0.0), (flashinfer.gemma_rmsnorm, 1.0)], ids=["plain", "gemma"]
)
def test_rmsnorm(shape, padded, function, offset, dtype, device):
    x = filled(shape, dtype, device, padded, scale=3.0)
    weight = filled(shape[-1:], dtype, device, False)
    eps = 1e-5
    want = rms_norm_oracle(x, weight, eps, offset)
    out = Guarded(shape, dtype, device, padded)
    assert function(x, weight, eps, out=out.tensor) is out.tensor
    # weight + 1 may cancel: its rounding counts against its terms
    scale, limit = rms_norm_oracle(x, weight.abs(), eps, offset), limit_of(dtype, int(offset))
    assert_close(out.tensor, want, scale, limit)
    out.check()
    assert_close(function(x, weight, eps), want, scale, limit)
    if not padded or len(shape) > 1:
        function(x, weight, eps, out=x)
        assert_close(x, want, scale, limit)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
def test_fused_add_rmsnorm(shape, padded, gemma, dtype, device):
    function = flashinfer.gemma_fused_add_rmsnorm if gemma else flashinfer.fused_add_rmsnorm
    x, residual = Guarded(shape, dtype, device, padded), Guarded(shape, dtype, device, not padded)
    x.tensor.copy_(filled(shape, dtype, device, False))
    residual.tensor.copy_(filled(shape, dtype, device, False))
    weight = filled(shape[-1:], dtype, device, False)
    terms = x.tensor.double().abs() + residual.tensor.double().abs()
    total = x.tensor.double() + residual.tensor.double()
    want = rms_norm_oracle(total, weight, 1e-6, float(gemma))
    ratio = torch.where(total == 0, 0.0, want / total)
    function(x.tensor, residual.tensor, weight)
    assert_close(residual.tensor, total)
    scale = torch.maximum((terms * ratio).abs(), rms_norm_oracle(total, weight.abs(), 1e-6, float(gemma)))
    assert_close(x.tensor, want, scale, limit_of(dtype, 1 + gemma))
    x.check()
    residual.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("affine_float32", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layernorm(shape, padded, affine_float32, mean, dtype, device):
    x = filled(shape, dtype, device, padded)
    x += mean
    affine = torch.float32 if affine_float32 else dtype
    gamma, beta = filled(shape[-1:], affine, device, False), filled(shape[-1:], affine, device, False)
    wide = x.double()
    center = wide.mean(-1, keepdim=True)
    std = torch.sqrt((wide - center).square().mean(-1, keepdim=True) + 1e-6)
    want = (wide - center) / std * gamma.double() + beta.double()
    # the mean is a sum too: its rounding error is that of the sum of all |x|
    terms = (wide.abs() + wide.abs().mean(-1, keepdim=True)) / std * gamma.double().abs() + beta.double().abs()
    out = Guarded(shape, dtype, device, padded)
    assert flashinfer.layernorm(x, gamma, beta, out=out.tensor) is out.tensor
    assert_close(out.tensor, want, terms)
    out.check()
    assert_close(flashinfer.layernorm(x, gamma, beta), want, terms)


def test_rows_of_a_fused_projection(dtype, device):
    """Normalise q and k of one [tokens, heads, dim] projection in place, head by head."""
    qkv = filled((11, 6, 128), dtype, device, True)
    weight = filled((128,), dtype, device, False)
    q, k = qkv[:, :4], qkv[:, 4:]
    want_q, want_k = rms_norm_oracle(q, weight, 1e-6), rms_norm_oracle(k, weight, 1e-6)
    flashinfer.rmsnorm(q, weight, out=q)
    assert_close(q, want_q)
    flashinfer.rmsnorm(k, weight, out=k)
    assert_close(k, want_k)


@pytest.mark.parametrize("function", [flashinfer.rmsnorm, flashinfer.gemma_rmsnorm, flashinfer.layernorm])
def test_permuted_dimensions(function, dtype, device):
    """Permute to [batch, heads, tokens, dim], a view that needs three leading dimensions."""
    x = filled((3, 5, 4, 128), dtype, device, True).transpose(1, 2)
    weight, bias = filled((128,), dtype, device, False), torch.zeros(128, dtype=dtype, device=device)
    given = (weight, bias) if function is flashinfer.layernorm else (weight,)
    want = function(x.contiguous(), *given)
    torch.testing.assert_close(function(x, *given), want, rtol=0, atol=0)
    out = Guarded((4, 3, 5, 128), dtype, device, True)
    function(x, *given, out=out.tensor.permute(1, 0, 2, 3))
    torch.testing.assert_close(out.tensor.permute(1, 0, 2, 3), want, rtol=0, atol=0)
    out.check()
    function(x, *given, out=x)
    torch.testing.assert_close(x, want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="input: got leading dimensions that do not merge into three"):
        function(filled((2, 3, 5, 4, 128), dtype, device, True).permute(3, 1, 0, 2, 4), *given)


def test_large_and_tiny_values_do_not_overflow_the_sum(device):
    x = torch.full((2, 512), 3.0e4, dtype=torch.float16, device=device)
    weight = torch.ones(512, dtype=torch.float16, device=device)
    assert_close(flashinfer.rmsnorm(x, weight), torch.ones(2, 512, dtype=torch.float64))
    zeros = torch.zeros(2, 512, dtype=torch.float16, device=device)
    assert_close(flashinfer.rmsnorm(zeros, weight), torch.zeros(2, 512, dtype=torch.float64))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(weight=torch.ones(7)), ValueError, r"weight: got shape \[7\], wanted \[8\]"),
        (dict(weight=torch.ones(8, dtype=torch.float16)), TypeError, "weight: got float16, wanted float32"),
        (dict(input=torch.tensor(1.0)), ValueError, "input: got 0 dimensions"),
        (dict(input=torch.ones(4, 8, dtype=torch.int32)), TypeError, "input: got int32, wanted float32"),
        (dict(input=torch.ones(8, 4).t()), ValueError, "input: got stride 4 of the last dimension"),
        (dict(input=[1.0]), TypeError, "input: got list, wanted Tensor"),
        (dict(out=torch.ones(4, 7)), ValueError, r"out: got shape \[4, 7\]"),
        (dict(out=torch.ones(4, 8).half()), TypeError, "out: got float16"),
    ],
)
def test_bad_input(change, error, message, device):
    good = dict(input=torch.ones(4, 8), weight=torch.ones(8), out=torch.full((4, 8), 7.0))
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in (good | change).items()
    }
    with pytest.raises(error, match=message):
        flashinfer.rmsnorm(**arguments)
    if "out" not in change:
        assert bool((arguments["out"] == 7.0).all()), "something was written before the error"


@pytest.mark.parametrize("strides", [(0, 1), (4, 1), (7, 1)])
def test_an_output_that_shares_memory_with_itself(strides, device):
    x, weight = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    memory = torch.zeros(64, device=device)
    with pytest.raises(ValueError, match="out: has elements that share memory"):
        flashinfer.rmsnorm(x, weight, out=memory.as_strided((4, 8), strides))
    assert not bool(memory.any())
    flashinfer.rmsnorm(x, weight, out=memory.as_strided((4, 8), (8, 1)))
    flashinfer.rmsnorm(x, weight, out=memory.as_strided((4, 8), (9, 1)))


def test_overlapping_output(device):
    memory = torch.randn(100, device=device)
    x, out = memory[:64].view(4, 16), memory[8:72].view(4, 16)
    with pytest.raises(ValueError, match="out: overlaps the memory of input"):
        flashinfer.rmsnorm(x, torch.ones(16, device=device), out=out)
    with pytest.raises(ValueError, match="input: overlaps the memory of residual"):
        flashinfer.fused_add_rmsnorm(x, out, torch.ones(16, device=device))


def test_memory_that_is_not_aligned():
    """Use unaligned memory, where a vector access would be a CUDA fault."""
    odd = torch.frombuffer(bytearray(4 * 8 + 1), dtype=torch.float32, offset=1)
    x, weight = torch.ones(2, 8), torch.ones(8)
    for call, argument in [
        (lambda: flashinfer.rmsnorm(odd, weight), "input"),
        (lambda: flashinfer.rmsnorm(x, odd), "weight"),
        (lambda: flashinfer.fused_add_rmsnorm(x, x.clone(), odd), "weight"),
        (lambda: flashinfer.layernorm(x, odd, weight), "gemma"),
        (lambda: flashinfer.layernorm(x, weight, odd), "beta"),
    ]:
        with pytest.raises(ValueError, match=f"{argument}: is not aligned to its element size of 4 bytes"):
            call()
