"""The activation family against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import flashinfer

from ..support.oracle import Guarded, assert_close, filled

SHAPES = [
    (1, 2),
    (3, 10),
    (7, 256),
    (2, 3, 128),
    (5, 2000),
    (4, 8192),
    (1, 40000),
    (33, 514),
    (0, 64),
    (3, 4, 0),
    (18,),
]


def sigmoid_gate(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(v)`` without cancellation for negative ``v``."""
    return torch.where(v < 0, x * v.clamp(max=0).exp(), x) / (1 + (-v.abs()).exp())


ORACLES = {
    "silu": lambda x: sigmoid_gate(x, x),
    "gelu_tanh": lambda x: sigmoid_gate(x, 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu": lambda x: x / 2 * torch.special.erfc(-x / math.sqrt(2)),
}
FUNCTIONS = {
    "silu": flashinfer.silu_and_mul,
    "gelu_tanh": flashinfer.gelu_tanh_and_mul,
    "gelu": flashinfer.gelu_and_mul,
}


def act_and_mul_oracle(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.cpu().double().chunk(2, -1)
    # Results smaller than any number of the type are zeros of either sign.
    return ORACLES[name](gate) * up


@pytest.fixture(params=list(FUNCTIONS))
def name(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("enable_pdl", [None, False, True])
def test_act_and_mul(shape, padded, enable_pdl, name, dtype, device):
    function = partial(FUNCTIONS[name], enable_pdl=enable_pdl)
    x = filled(shape, dtype, device, padded, scale=4.0)
    want = act_and_mul_oracle(name, x)
    out = Guarded((*shape[:-1], shape[-1] // 2), dtype, device, not padded)
    assert function(x, out=out.tensor) is out.tensor
    assert_close(out.tensor, want)
    out.check()
    assert_close(function(x), want)


def test_every_argument_keeps_its_digits(name, dtype, device):
    """Cover the range where the result is neither the argument nor zero, with the smallest results."""
    gate = torch.cat([torch.linspace(-120, 20, 20001), torch.linspace(-16, 6, 20001), torch.randn(1000) * 1e-3])
    x = torch.stack([gate, torch.ones_like(gate)]).t().contiguous().to(dtype)
    got = FUNCTIONS[name](x.to(device))
    assert_close(got, act_and_mul_oracle(name, x))


@pytest.mark.parametrize("factor", [1e5, -3e30, 1e-5])
def test_factor_reaches_into_the_tail(name, factor, device):
    """Take act(gate) below the smallest float32 whose product with the factor is not."""
    gate = torch.linspace(-100, 5, 4001)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.stack([gate, torch.full_like(gate, factor)]).t().contiguous().to(dtype)
        assert_close(FUNCTIONS[name](x.to(device)), act_and_mul_oracle(name, x))


def test_infinite_and_nan(name, dtype, device):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([-inf, inf, nan, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).min, 1.0, 1.0])
    up = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0, 1.0, nan, -inf])
    got = FUNCTIONS[name](torch.stack([gate, up]).t().contiguous().to(device, dtype)).flatten().tolist()
    want = [0.0, inf, nan, 0.0, torch.finfo(dtype).max, 0.0, nan, -inf]
    assert [str(abs(v)) if v == 0 else str(v) for v in got] == [str(v) for v in want]


def test_in_place_and_strided_rows(name, dtype, device):
    x = filled((5, 2, 3, 96), dtype, device, True, scale=4.0)[:, 1]
    want = act_and_mul_oracle(name, x)
    assert_close(FUNCTIONS[name](x.transpose(0, 1)), want.transpose(0, 1))
    gate = x[..., :48]
    assert FUNCTIONS[name](x, out=gate) is gate
    assert_close(gate, want)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(input=torch.ones(4, 15)), ValueError, "input: got a last dimension of 15, wanted an even one"),
        (dict(input=torch.tensor(1.0)), ValueError, "input: got 0 dimensions"),
        (dict(input=torch.ones(4, 16, dtype=torch.int32)), TypeError, "input: got int32, wanted float32"),
        (dict(input=torch.ones(16, 4).t()), ValueError, "input: got stride 4 of the last dimension"),
        (dict(input=[1.0]), TypeError, "input: got list, wanted Tensor"),
        (dict(out=torch.ones(4, 16)), ValueError, r"out: got shape \[4, 16\], wanted \[4, 8\]"),
        (dict(out=torch.ones(4, 8).half()), TypeError, "out: got float16, wanted float32"),
        (dict(out=torch.ones(8, 4).t()), ValueError, "out: got stride 4 of the last dimension"),
    ],
)
def test_bad_input(change, error, message, name, device):
    out = torch.full((4, 8), 7.0, device=device)
    arguments = dict(input=torch.ones(4, 16), out=out) | change
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match=message):
        FUNCTIONS[name](**arguments)
    assert bool((out == 7.0).all()), "something was written before the error"
    if "out" not in change:
        with pytest.raises(error, match=message):
            FUNCTIONS[name](arguments["input"])


def test_overlapping_output(name, device):
    x = torch.randn(4, 16, device=device)
    for out in (x[:, 8:], x[:, 4:12], x.flatten()[4:36].view(4, 8)):
        with pytest.raises(ValueError, match="out: overlaps the memory of input"):
            FUNCTIONS[name](x, out=out)
    with pytest.raises(ValueError, match="out: has elements that share memory"):
        FUNCTIONS[name](x, out=torch.ones(1, 8, device=device).expand(4, 8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_tensors_on_two_devices(name):
    with pytest.raises(ValueError, match="one device|another device"):
        FUNCTIONS[name](torch.ones(4, 16), out=torch.ones(4, 8, device="cuda"))


def test_module_names_and_unknown_function(name):
    assert flashinfer.gen_act_and_mul_module(name, "cpu").name == f"activation_{name}_cpu"
    assert hasattr(flashinfer.get_act_and_mul_module(name, "cpu"), f"{name}_and_mul")
    with pytest.raises(ValueError, match="act_func_name: got 'relu', wanted one of silu, gelu, gelu_tanh"):
        flashinfer.gen_act_and_mul_module("relu")
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        flashinfer.gen_act_and_mul_module(name, "tpu")
