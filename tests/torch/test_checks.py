"""Tests of the shared checks: each accepts its limits, and its errors name function, argument, got and wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer._ops import arguments, dtypes, indices, numbers, tensors

HALF = torch.float16
META = torch.device("meta")
GRID = torch.arange(12).view(3, 4)
TABLE = torch.tensor([3, 0, 5])

ACCEPTED: list[Callable[[], Any]] = [
    lambda: arguments.check_none("f", "x", None, "why"),
    lambda: arguments.check_present("f", "x", 0, "a number"),
    lambda: arguments.check_not_both("f", "x", None, "y", 1),
    lambda: arguments.check_not_both("f", "x", 1, "y", None),
    lambda: arguments.check_no_extra("f", ()),
    lambda: arguments.check_items("f", "x", (1, 2), "sizes", 2),
    lambda: arguments.check_items("f", "x", [], "sizes"),
    lambda: arguments.check_equal("f", "x", [4, 4, 4], "rows"),
    lambda: arguments.check_equal("f", "x", [], "rows"),
    lambda: arguments.check_planned("f", 0),
    lambda: arguments.check_as_planned("f", "x", 3, 3, "rows"),
    lambda: arguments.check_as_planned("f", "x", HALF, HALF),
    lambda: numbers.check_range("f", "x", 1, 1),
    lambda: numbers.check_range("f", "x", 5, 1, 5),
    lambda: numbers.check_range("f", "x", -7, most=-7),
    lambda: numbers.check_multiple("f", "x", 0, "y", 4),
    lambda: numbers.check_option("f", "x", "a", ("a", "b")),
    lambda: numbers.positive_real("f", "x", 5e-324),
    lambda: numbers.finite("f", "x", -1.7e308),
    lambda: tensors.check_device("f", "x", GRID, GRID.device),
    lambda: tensors.check_count("f", "x", GRID, 12),
    lambda: tensors.check_vector("f", "x", TABLE, torch.int32, torch.int64),
    lambda: tensors.check_vector("f", "x", TABLE[:0], torch.int64),
    lambda: indices.check_each("f", "x", TABLE, 0, 5),
    lambda: indices.check_each("f", "x", TABLE, TABLE, TABLE),
    lambda: indices.check_each("f", "x", TABLE[:0], 0, -1),
]


@pytest.mark.parametrize("number", range(len(ACCEPTED)))
def test_accepted(number):
    ACCEPTED[number]()


REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "got int, wanted None: nothing is added", lambda: arguments.check_none("f", "x", 0, "nothing is added")),
    (ValueError, "got None, wanted a pool", lambda: arguments.check_present("f", "x", None, "a pool")),
    (ValueError, "got both, wanted only x or only y", lambda: arguments.check_not_both("f", "x", 0, "y", 0)),
    (ValueError, "got None, wanted all or none of y, x", lambda: arguments.all_or_none("f", y=0, x=None)),
    (TypeError, "got str, wanted a list or tuple of sizes", lambda: arguments.check_items("f", "x", "ab", "sizes", 2)),
    (TypeError, "got Tensor, wanted a list or tuple of sizes", lambda: arguments.check_items("f", "x", TABLE, "sizes")),
    (ValueError, "got 1, wanted 2, sizes", lambda: arguments.check_items("f", "x", [1], "sizes", 2)),
    (ValueError, "got [4, 5] rows, wanted equal numbers", lambda: arguments.check_equal("f", "x", (4, 5), "rows")),
    (ValueError, "got 4 rows, and plan() was called for 3", lambda: arguments.check_as_planned("f", "x", 4, 3, "rows")),
    (TypeError, "got torch.float16, and plan() was called for torch.int8", lambda: arguments.check_as_planned("f", "x", HALF, torch.int8)),
    (ValueError, "got 0, wanted at least 1", lambda: numbers.check_range("f", "x", 0, 1)),
    (ValueError, "got 6 pages, wanted 1 to 5, as y has", lambda: numbers.check_range("f", "x", 6, 1, 5, "pages", ", as y has")),
    (ValueError, "got 0, wanted at most -1", lambda: numbers.check_range("f", "x", 0, most=-1)),
    (ValueError, "got 4, wanted 3", lambda: numbers.check_range("f", "x", 4, 3, 3)),
    (ValueError, "got 2, wanted 3 to 4", lambda: numbers.whole("f", "x", torch.tensor(2), 3, 4)),
    (TypeError, "got 3.0, wanted an integer", lambda: numbers.whole("f", "x", 3.0, 3, 4)),
    (ValueError, "got 7, wanted a multiple of y, 2", lambda: numbers.check_multiple("f", "x", 7, "y", 2)),
    (ValueError, "got 7, wanted a multiple of y, 0", lambda: numbers.check_multiple("f", "x", 7, "y", 0)),
    (ValueError, "got 'c', wanted 'a' or 'b' on cpu", lambda: numbers.check_option("f", "x", "c", ("a", "b"), " on cpu")),
    (ValueError, "got 'c', wanted 'a' or 'b'", lambda: numbers.choice("f", "x", "c", {"a": 0, "b": 1})),
    (ValueError, "got 0.0, wanted a positive number", lambda: numbers.positive_real("f", "x", 0)),
    (ValueError, "got nan, wanted a positive number", lambda: numbers.positive_real("f", "x", float("nan"))),
    (ValueError, "got 8.0, wanted a positive number up to 4", lambda: numbers.positive_real("f", "x", 8, 4.0)),
    (ValueError, "got inf, wanted a finite number", lambda: numbers.finite("f", "x", float("inf"))),
    (TypeError, "got str, wanted a number", lambda: numbers.finite("f", "x", "a")),
    (ValueError, "got a tensor on cpu, wanted one on meta as y is", lambda: tensors.check_device("f", "x", GRID, META, " as y is")),
    (ValueError, "got 12 elements, wanted 3", lambda: tensors.check_count("f", "x", GRID, 3)),
    (TypeError, "got list, wanted Tensor", lambda: tensors.check_vector("f", "x", [1], torch.int64)),
    (TypeError, "got torch.int64, wanted torch.int32", lambda: tensors.check_vector("f", "x", TABLE, torch.int32)),
    (ValueError, "got shape [3, 4] and strides [4, 1], wanted a contiguous vector", lambda: tensors.check_vector("f", "x", GRID, torch.int64)),
    (ValueError, "got shape [3] and strides [4], wanted a contiguous vector", lambda: tensors.check_vector("f", "x", GRID[:, 0], torch.int64)),
    (ValueError, "got 'float61', wanted the name of a torch dtype", lambda: dtypes.dtype_of("f", "x", "float61")),
    (ValueError, "got 'nn', wanted the name of a torch dtype", lambda: dtypes.dtype_of("f", "x", "nn")),
    (TypeError, "got int, wanted a torch.dtype or its name", lambda: dtypes.dtype_of("f", "x", 16)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_refused(error, text, call):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(f"f: x: {text}")


def test_results():
    assert arguments.check_present("f", "x", "a", "b") == "a"
    assert arguments.check_planned("f", "plan") == "plan"
    assert arguments.all_or_none("f", x=0, y=0) and not arguments.all_or_none("f", x=None, y=None)
    assert numbers.whole("f", "x", torch.tensor(3), 3, 4) == 3
    assert numbers.choice("f", "x", "b", {"a": 0, "b": 1}) == 1
    assert numbers.positive_real("f", "x", torch.tensor(2)) == 2.0
    assert tensors.check_vector("f", "x", TABLE, torch.int64) is TABLE
    assert dtypes.dtype_of("f", "x", "float16") is HALF and dtypes.dtype_of("f", "x", HALF) is HALF


def test_calls_without_a_plan_or_with_more_arguments():
    with pytest.raises(ValueError, match=r"^f: got no plan, wanted a call of begin_forward\(\) before$"):
        arguments.check_planned("f", None, "begin_forward()")
    with pytest.raises(TypeError, match="^f: got 2 more arguments, wanted none without jit_args$"):
        arguments.check_no_extra("f", (1, 2), " without jit_args")


def test_numbers_of_a_table():
    """The first wrong number is named, with its own limits."""
    with pytest.raises(ValueError, match=r"^f: x\[2\]: got 5, wanted 0 to 4, slots of y$"):
        indices.check_each("f", "x", TABLE, 0, 4, ", slots of y")
    with pytest.raises(ValueError, match=r"^f: x\[0\]: got 3, wanted 4 to 9$"):
        indices.check_each("f", "x", TABLE, torch.tensor([4, 1, 1]), torch.tensor([9, 8, 7]))
