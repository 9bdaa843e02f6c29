"""RMSNorm with a gate against float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import flashinfer

from ..support.oracle import assert_close, filled
from .oracle import gated, wide

SHAPES = [(1, 1), (3, 6), (7, 128), (2, 3, 64), (5, 1000), (4, 4096), (1, 40000), (0, 64), (9,)]
OPTIONS = [
    dict(activation=activation, norm_before_gate=before)
    for activation, before in itertools.product(("silu", "sigmoid"), (True, False))
]


def grouped(shape: tuple[int, ...]) -> int | None:
    """A group size that divides the last dimension, or none."""
    return random.choice([None, *(one for one in (1, 2, 8, 32, 500) if shape[-1] % one == 0)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_values(shape, options, dtype, device):
    padded = random.random() < 0.5
    x, gate = filled(shape, dtype, device, padded, scale=3.0), filled(shape, dtype, device, not padded, scale=2.0)
    weight, options = filled(shape[-1:], dtype, device, False), options | dict(group_size=grouped(shape))
    got = flashinfer.gated_rmsnorm(x, gate, weight, 1e-5, **options)
    assert got.is_contiguous()
    assert_close(got, gated(*wide(x, gate, weight), 1e-5, **options))


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gates_far_from_zero(activation, dtype, device):
    gate = torch.tensor([-1e4, -90.0, -40.0, -17.0, 0.0, 17.0, 90.0, 1e4], dtype=dtype, device=device)
    x, weight = torch.ones_like(gate), torch.ones_like(gate)
    got = flashinfer.gated_rmsnorm(x, gate, weight, 0.0, activation=activation)
    want = gated(*wide(x, gate, weight), 0.0, activation=activation)
    assert_close(got, want, want.abs() + 1e-30)
    inf, nan = float("inf"), float("nan")
    ends = torch.tensor([-inf, inf, nan], dtype=dtype, device=device)
    got = flashinfer.gated_rmsnorm(x[:3], ends, weight[:3], 0.0, activation=activation).tolist()
    assert got[0] == 0.0 and got[1] == (1.0 if activation == "sigmoid" else inf) and got[2] != got[2]


def test_strides_of_a_projection(device):
    """A gate that is part of a wider row, and heads whose order was changed."""
    mixed = torch.randn(3, 5, 4, 80, device=device)
    x, gate = torch.randn(3, 4, 5, 32, device=device).transpose(1, 2), mixed[..., 48:]
    weight = torch.randn(32, device=device)
    assert_close(flashinfer.gated_rmsnorm(x, gate, weight), gated(*wide(x, gate, weight), 1e-6))


@pytest.mark.parametrize(
    "change, options, error, message",
    [
        (dict(gate=torch.ones(4, 7)), {}, ValueError, r"gate: got shape \[4, 7\], wanted \[4, 8\] as input has"),
        (dict(gate=torch.ones(4, 8).half()), {}, TypeError, "gate: got float16, wanted float32"),
        (dict(gate=torch.ones(8, 4).t()), {}, ValueError, "gate: got stride 4 of the last dimension"),
        (dict(weight=torch.ones(7)), {}, ValueError, r"weight: got shape \[7\], wanted \[8\]"),
        (dict(weight=torch.ones(8).half()), {}, TypeError, "weight: got float16, wanted float32"),
        (dict(input=torch.ones(4, 8, dtype=torch.int32)), {}, TypeError, "input: got int32, wanted float32"),
        ({}, dict(group_size=3), ValueError, "group_size: got 3, wanted a divisor of the last dimension's 8"),
        ({}, dict(group_size=0), ValueError, "group_size: got 0, wanted a divisor"),
        ({}, dict(activation="relu"), ValueError, "activation: got 'relu', wanted 'silu', 'swish' or 'sigmoid'"),
    ],
)
def test_bad_input(change, options, error, message, device):
    given = dict(input=torch.ones(4, 8), gate=torch.ones(4, 8), weight=torch.ones(8)) | change
    given = {name: one.to(device) for name, one in given.items()}
    with pytest.raises(error, match=f"gated_rmsnorm: {message}"):
        flashinfer.gated_rmsnorm(**given, **options)
