"""What must hold for the steps of a pipeline before they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from .op import Op
from .operators import FusedTemperatureSoftmaxOp, SoftmaxOp
from .types import TensorType

ValidityCheck = Callable[[Sequence[Op]], None]


class CompileError(ValueError):
    """Steps that make no pipeline."""


def one_softmax(ops: Sequence[Op]) -> None:
    """At most one step is a softmax."""
    count = sum(isinstance(op, SoftmaxOp | FusedTemperatureSoftmaxOp) for op in ops)
    if count > 1:
        raise CompileError(f"got {count} steps of Softmax, wanted at most one")


def nothing_after_indices(ops: Sequence[Op]) -> None:
    """A step that draws is the last."""
    for op in ops[:-1]:
        if op.OUT == TensorType.INDICES:
            raise CompileError(f"got a step after {op!r}, which returns INDICES")


def types_chain(ops: Sequence[Op]) -> None:
    """Each step takes what the one before returns."""
    for before, after in pairwise(ops):
        if before.OUT != after.IN:
            raise CompileError(f"{after!r} takes {after.IN.name}, and {before!r} before it returns {before.OUT.name}")


def validity_checks() -> list[ValidityCheck]:
    """Those that every pipeline has to pass."""
    return [one_softmax, nothing_after_indices, types_chain]
