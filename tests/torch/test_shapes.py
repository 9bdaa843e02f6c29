"""Tests of ``check_tensors()``, which checks the tensors of a function against a schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._ops.shapes import check_tensors

FLOATS = (torch.float32, torch.float16)


def product(a: Any, b: Any, bias: Any = None, table: Any = None) -> tuple[int, ...]:
    return check_tensors(
        "product", a=(a, "b m k", FLOATS), b=(b, "b k n", "a"), bias=(bias, "?n", FLOATS), table=(table, "?b+1 _ 3")
    )


def arguments(device: str, **change: Any) -> dict[str, Any]:
    made = dict(
        a=torch.ones(2, 5, 7, device=device), b=torch.ones(2, 7, 9, device=device), bias=torch.ones(9, device=device),
        table=torch.ones(3, 8, 3, device=device),
    )  # fmt: skip
    return made | change


def test_sizes_come_in_the_order_of_the_letters(device):
    assert product(**arguments(device)) == (2, 5, 7, 9)
    assert product(**arguments(device, bias=None, table=None)) == (2, 5, 7, 9)
    assert product(**arguments("meta")) == (2, 5, 7, 9), "nothing is read"
    empty = dict(a=torch.ones(0, 5, 0, device=device), b=torch.ones(0, 0, 9, device=device))
    assert product(**empty) == (0, 5, 0, 9)
    turned = arguments(device)["b"].mT.contiguous().mT
    assert product(**arguments(device, b=turned)) == (2, 5, 7, 9)
    assert check_tensors("table", table=(torch.ones(4), "e+1")) == (3,)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(a=None), TypeError, "a: got NoneType, wanted Tensor"),
    (dict(b=[1.0]), TypeError, "b: got list, wanted Tensor"),
    (dict(bias=1.0), TypeError, "bias: got float, wanted Tensor"),
    (dict(a=torch.ones(2, 5, 7).to_sparse()), ValueError, "a: got a tensor of torch.sparse_coo and torch.float32, wanted a"),
    (dict(a=torch.ones(2, 5)), ValueError, "a: got 2 dimensions, wanted 3"),
    (dict(b=torch.ones(3, 7, 9)), ValueError, "b: got shape [3, 7, 9], wanted [2, 7, any]"),
    (dict(b=torch.ones(1, 7, 9)), ValueError, "b: got shape [1, 7, 9], wanted [2, 7, any]"),
    (dict(b=torch.ones(2, 9, 7)), ValueError, "b: got shape [2, 9, 7], wanted [2, 7, any]"),
    (dict(bias=torch.ones(8)), ValueError, "bias: got shape [8], wanted [9]"),
    (dict(table=torch.ones(2, 8, 3)), ValueError, "table: got shape [2, 8, 3], wanted [3, any, 3]"),
    (dict(table=torch.ones(3, 8, 4)), ValueError, "table: got shape [3, 8, 4], wanted [3, any, 3]"),
    (dict(a=torch.ones(2, 5, 7).int()), TypeError, "a: got torch.int32, wanted torch.float32 or torch.float16"),
    (dict(b=torch.ones(2, 7, 9).half()), TypeError, "b: got torch.float16, wanted torch.float32 as a has"),
    (dict(bias=torch.ones(9, device="meta")), ValueError, "bias: got a tensor on meta, wanted one on cpu as a is"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[text for _, _, text in BAD])
def test_errors(change, error, text):
    with pytest.raises(error) as raised:
        product(**arguments("cpu", **change))
    assert str(raised.value).startswith(f"product: {text}")


def test_computed_sizes(device):
    x = torch.ones(2, 3, device=device)
    assert check_tensors("f", x=(x, (2, 3), FLOATS), y=(None, ("?", 4)), z=(x, ("?", 2, 3)), any_shape=(x, None)) == ()
    assert check_tensors("f", x=(torch.ones((), device=device), ())) == ()
    for dims, error, text in (
        ((2, 4), ValueError, r"f: x: got shape \[2, 3\], wanted \[2, 4\]"),
        (("?", 3, 3), ValueError, r"f: x: got shape \[2, 3\], wanted \[3, 3\]"),
        ((2,), ValueError, "f: x: got 2 dimensions, wanted 1"),
        ((), ValueError, "f: x: got 2 dimensions, wanted 0"),
    ):
        with pytest.raises(error, match=text):
            check_tensors("f", x=(x, dims))
    for dims in ((2, 3), None, ()):
        with pytest.raises(TypeError, match="f: x: got NoneType, wanted Tensor"):
            check_tensors("f", x=(None, dims))


@pytest.mark.parametrize("unbacked", [False, True])
def test_in_a_graph(unbacked, device, cold_dynamo):
    """One graph serves all sizes, and reports sizes that do not fit."""

    def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        _, m, _, n = check_tensors("multiplied", a=(a, "b m k", FLOATS), b=(b, "b k n", "a"))
        return torch.bmm(a, b).reshape(-1, m * n)

    compiled = torch.compile(multiplied, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for b, m, k, n in ((2, 5, 7, 9), (4, 3, 11, 6)):
            x, y = torch.randn(b, m, k, device=device), torch.randn(b, k, n, device=device)
            if unbacked:
                torch._dynamo.decorators.mark_unbacked(x, 1)
            torch.testing.assert_close(compiled(x, y), multiplied(x, y))
    # Before torch 2.13 Dynamo reports an error of traced code without its text.
    text = "multiplied: b: got shape" if torch.__version__ >= "2.13" else "Observed exception"
    with pytest.raises(Exception, match=text):
        compiled(torch.ones(2, 5, 7, device=device), torch.ones(2, 8, 9, device=device))
