"""GEMM with a fused gate: matrices have two halves, and the result is silu(gate) * linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._gemm.operators import GATE_FIRST, LINEAR_FIRST, grouped_gemm

from ..support.oracle import ulp
from .oracle import SENTINEL, drawn, product
from .test_hopper_gemm import SIZES, arch_of

NO_FACTORS = (None, None)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_gated(
    got: torch.Tensor, gate: tuple[torch.Tensor, torch.Tensor], linear: tuple[torch.Tensor, torch.Tensor], rounds: bool
) -> None:
    """Check that ``got`` is ``silu(gate) * linear`` rounded once, except for errors of both sums and of exp.

    ``gate`` and ``linear`` are pairs of a product and the product of its magnitudes. ``rounds``: both were rounded when
    stored. The slope of silu is at most 1.1.
    """
    (g, of_gate), (u, of_linear) = gate, linear
    silu = g * g.sigmoid()
    of_gate, of_linear = of_gate * 2**-20, of_linear * 2**-20
    if rounds:
        of_gate, of_linear = of_gate + ulp(g, got.dtype) / 2, of_linear + ulp(u, got.dtype) / 2
    want = silu * u
    bound = 1.1 * of_gate * (u.abs() + of_linear) + silu.abs() * of_linear + want.abs() * 2**-18
    error = (got.double() - want).abs()
    assert bool((error <= bound + ulp(want.abs() + bound, got.dtype) / 2 * 1.001).all())


@pytest.mark.parametrize("gate", [LINEAR_FIRST, GATE_FIRST])
@pytest.mark.parametrize("inner", [72, 200, 12])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("more", [[], [0] * 100, [2500]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_of_a_tile(dtype, more, gathers, inner, gate, device):
    """Use strips that end inside a CTA or a cluster, and halves without whole lines."""
    sizes = [*SIZES[torch.randint(0, 3, ()) :], *more]
    rows, k = sum(sizes), 208
    indptr = torch.tensor([0, *sizes]).cumsum(0).int().to(device)
    x, b = drawn(rows + 5, k, dtype=dtype, device=device), drawn(len(sizes), 2 * inner, k, dtype=dtype, device=device)
    b /= 8
    places = torch.randint(0, rows, (rows + 5,), device=device, dtype=torch.int32) if gathers else None
    taken = x if places is None else x[places.long()]
    parts = [product(a.double(), y.double()) for a, y in zip(taken[:rows].split(sizes), b, strict=True)]
    halves = [torch.cat(part).split(inner, 1) for part in zip(*parts, strict=True)]
    first, second = zip(*halves, strict=True)
    buffer = torch.full((rows + 7, inner), SENTINEL, device=device, dtype=dtype)
    out = buffer[1:-1]
    grouped_gemm(out, x, b, *NO_FACTORS, indptr, None, None, places, None, 0, 0, 0, gate=gate)
    fused = arch_of(device) == 90 and dtype != torch.float32 and inner % 8 == 0
    linear_first = gate == LINEAR_FIRST
    assert_gated(out[:rows], second if linear_first else first, first if linear_first else second, rounds=not fused)
    assert bool((out[rows:] == SENTINEL).all() and (buffer[[0, -1]] == SENTINEL).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype, device):
    x, b = drawn(300, 64, dtype=dtype, device=device), drawn(3, 48, 64, dtype=dtype, device=device)
    indptr = torch.tensor([0, 90, 91, 300], dtype=torch.int32, device=device)

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(300, 24, device=device, dtype=dtype)
        grouped_gemm(out, rows, b, *NO_FACTORS, indptr, *[None] * 4, 0, 0, 0, gate=GATE_FIRST)
        return out

    whole = run(x)
    assert run(x).equal(whole)
    x[[7, 90]] = torch.nan
    broken, others = run(x), torch.ones(300, dtype=torch.bool, device=device)
    others[[7, 90]] = False
    assert broken[~others].isnan().all() and broken[others].equal(whole[others])


def test_errors_of_a_gate(device):
    x, b, out = (torch.ones(shape, device=device) for shape in ((4, 8), (1, 16, 8), (4, 8)))
    indptr = torch.tensor([0, 4], dtype=torch.int32, device=device)
    given: dict[str, Any] = dict(
        out=out, a=x, b=b, a_scale=None, b_scale=None, m_indptr=indptr, m_counts=None, b_indices=None, a_rows=None,
        row_scale=None, gm=0, gn=0, gk=0,
    )  # fmt: skip
    for error, message, change, gate in (
        (ValueError, "gate: got another number", {}, 3),
        (ValueError, "m_indptr: got None or int64", dict(m_indptr=indptr.long()), 1),
        (ValueError, "m_indptr: got None or int64", dict(m_indptr=None), 1),
        (ValueError, "gate: got factors", dict(row_scale=torch.ones(4, device=device)), 1),
        (TypeError, "out: got float16, wanted float32", dict(out=out.half()), 1),
    ):
        with pytest.raises(error, match=message):
            grouped_gemm(*(given | change).values(), gate=gate)
