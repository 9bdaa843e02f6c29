"""From processors to steps: each type follows from the one before."""

from __future__ import annotations

from collections.abc import Sequence

from .op import Op
from .processors import LogitsProcessor
from .types import TensorType


class LegalizationError(ValueError):
    """Processors that cannot follow each other."""


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """The type that the first processor takes.

    Raises:
        LegalizationError: it takes several.
    """
    inputs = processors[0].INPUTS
    if len(inputs) > 1:
        names = " and ".join(one.name for one in inputs)
        raise LegalizationError(f"Cannot infer input type: {processors[0]!r} takes {names}, wanted input_type")
    return inputs[0]


def legalize_processors(
    processors: Sequence[LogitsProcessor], input_type: TensorType | None = None
) -> tuple[list[Op], TensorType]:
    """The steps of a pipeline, and the type that it takes.

    Raises:
        LegalizationError: no processors, an input whose type does not follow, or one that a processor does not take.
    """
    if not processors:
        raise LegalizationError("Pipeline cannot be empty")
    initial = current = infer_initial_type(processors) if input_type is None else input_type
    ops: list[Op] = []
    for number, processor in enumerate(processors):
        if current not in processor.INPUTS:
            wanted = " or ".join(one.name for one in processor.INPUTS)
            raise LegalizationError(f"processor {number} ({processor!r}): got {current.name}, wanted {wanted}")
        ops += processor.legalize(current)
        current = ops[-1].OUT
    return ops, initial
