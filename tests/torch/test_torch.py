"""Tests of torch's features with our functions: gradients, export and vmap.

``python -m tests.torch.test_torch`` prints the table in ``docs/torch.md``. The tests compare its rows with the results.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError

from ..support.cases import Case
from ..support.samples import attention_cases, public_cases

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
NO_RULE = "the fallback path doesn't work on out= or view ops"


def cases(device: str) -> dict[str, Case]:
    return {**public_cases(device), **attention_cases(device)}


CASES = list(cases("cpu"))


class Program(torch.nn.Module):
    """A module that calls one function. Its inputs are the arguments that differ between calls."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function, self.names = case.function, list(case.arguments(9))

    def forward(self, *arguments: Any) -> Any:
        return self.function(**dict(zip(self.names, arguments, strict=True)))


def called(function: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """Call a function with copies of its arguments. Return the results and the copies."""
    own = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    result = function(*own)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return [*results, *(one for one in own if isinstance(one, torch.Tensor))]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def gradient(case: Case) -> str:
    """Return the table's entry for gradients. Tests of the families check their values."""
    arguments = case.arguments(9)
    leaves = {
        key: one.requires_grad_() for key, one in arguments.items() if torch.is_tensor(one) and one.is_floating_point()
    }
    written = {key: arguments[key] * 1 for key in case.written}  # a leaf cannot be written
    if not leaves:
        return "not applicable"
    try:
        result = case.function(**arguments | written)
        results = [*([] if result is None else [result] if torch.is_tensor(result) else result), *written.values()]
        if not any(one.requires_grad for one in results):
            return "not applicable"  # tokens, for example
        grads = torch.autograd.grad(results, [leaves[key] for key in case.differentiable], results)
    except GradientError as err:
        assert "has no gradient" in str(err)
        return "error"
    assert grads and all(bool(grad.isfinite().all()) for grad in grads)
    return "yes"


def dynamic_shapes(case: Case) -> tuple[Any, ...]:
    """Return the sizes and numbers among a program's inputs that depend on the number of tokens."""
    auto = torch.export.Dim.AUTO
    few, many = case.arguments(9), case.arguments(18)
    return tuple(
        {0: auto} if isinstance(one, torch.Tensor) and one.shape != many[key].shape
        else auto if isinstance(one, int) and one != many[key]
        else None
        for key, one in few.items()
    )  # fmt: skip


def export(case: Case) -> str:
    program = torch.export.export(
        Program(case), tuple(case.arguments(9).values()), dynamic_shapes={"arguments": dynamic_shapes(case)}
    )
    for size in (9, 21, 40):
        arguments = list(case.arguments(size).values())
        assert_same(called(program.module(), arguments), called(Program(case), arguments))
    return "yes"


def vmap(case: Case) -> str:
    calls = [list(case.arguments(9).values()) for _ in range(3)]
    stacked = [
        torch.stack(several) if isinstance(several[0], torch.Tensor) else several[0]
        for several in zip(*calls, strict=True)
    ]
    dims = tuple(0 if isinstance(one, torch.Tensor) else None for one in stacked)
    program = Program(case)

    def returning(*arguments: Any) -> Any:
        result = program(*arguments)
        return () if result is None else result

    try:
        result = torch.func.vmap(returning, in_dims=dims)(*stacked)
    except RuntimeError as err:
        sentence = str(err)
        assert NO_RULE in sentence or "calling .item() on a Tensor" in sentence, sentence
        return "error"
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    for number, arguments in enumerate(calls):
        assert_same([one[number] for one in results], called(program, arguments)[: len(results)])
    return "yes"


def row(name: str, device: str) -> str:
    case = cases(device)[name]
    function, _, out = name.partition(" ")
    cells = [f"`{function}`{f' with `{out}`' if out else ''}", gradient(case), export(case), vmap(case)]
    return f"| {' | '.join(cells)} |"


# From torch 2.15 on, the dispatcher passes C++ warnings on to Python: here that of vmap's loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_rows_of_the_document(name, device):
    assert row(name, device) in DOCUMENT.read_text().splitlines(), "run: python -m tests.torch.test_torch"


def test_the_document_has_no_other_rows():
    (table,) = re.findall(
        r"<!-- python -m tests.torch.test_torch -->\n(.*?)\n<!-- end -->", DOCUMENT.read_text(), re.DOTALL
    )
    assert len(table.splitlines()) == 2 + len(CASES)


if __name__ == "__main__":
    print("| function | gradient | `torch.export` | `torch.func.vmap` |\n| --- | --- | --- | --- |")
    for name in CASES:
        print(row(name, "cpu"), flush=True)
