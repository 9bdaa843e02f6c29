"""Checks of a pipeline's steps before they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from .op import Op
from .operators import FusedTemperatureSoftmaxOp, SoftmaxOp
from .types import TensorType

ValidityCheck = Callable[[Sequence[Op]], None]


class CompileError(ValueError):
    """Error for steps that form no pipeline."""


def one_softmax(ops: Sequence[Op]) -> None:
    """Check that at most one step is a softmax."""
    count = sum(isinstance(op, SoftmaxOp | FusedTemperatureSoftmaxOp) for op in ops)
    if count > 1:
        raise CompileError(f"got {count} steps of Softmax, wanted at most one")


def nothing_after_indices(ops: Sequence[Op]) -> None:
    """Check that a step that draws is the last."""
    for op in ops[:-1]:
        if op.OUT == TensorType.INDICES:
            raise CompileError(f"got a step after {op!r}, which returns INDICES")


def types_chain(ops: Sequence[Op]) -> None:
    """Check that each step accepts the result of the previous one."""
    for before, after in pairwise(ops):
        if before.OUT != after.IN:
            raise CompileError(f"{after!r} takes {after.IN.name}, and {before!r} before it returns {before.OUT.name}")


def validity_checks() -> list[ValidityCheck]:
    """Return the checks of every pipeline."""

    return [one_softmax, nothing_after_indices, types_chain]
