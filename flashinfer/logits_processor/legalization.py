"""Conversion of processors into steps. Each type follows from the previous one."""

from __future__ import annotations

from collections.abc import Sequence

from .op import Op
from .processors import LogitsProcessor
from .types import TensorType


class LegalizationError(ValueError):
    """Processors that cannot follow each other."""


def types_of(processor: LogitsProcessor) -> tuple[TensorType, ...]:
    """Return the types that a processor takes: its ``INPUTS``, or those for which it returns steps."""
    if processor.INPUTS is not None:
        return processor.INPUTS

    def takes(kind: TensorType) -> bool:
        try:
            ops = processor.legalize(kind)
        except ValueError:
            return False
        return bool(ops) and kind == ops[0].IN

    return tuple(kind for kind in (TensorType.LOGITS, TensorType.PROBS) if takes(kind))


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """Return the type that the first processor takes.

    Raises:
        LegalizationError: no processors, or a first one that takes no type or several.
    """
    if not processors:
        raise LegalizationError("Pipeline cannot be empty")
    inputs = types_of(processors[0])
    if len(inputs) != 1:
        names = " and ".join(one.name for one in inputs) or "neither LOGITS nor PROBS"
        raise LegalizationError(f"Cannot infer input type: {processors[0]!r} takes {names}, wanted input_type")
    return inputs[0]


def legalize_processors(processors: Sequence[LogitsProcessor], input_type: TensorType | None = None) -> list[Op]:
    """Return the steps of a pipeline.

    Args:
        processors: at least one.
        input_type: of the pipeline's input; ``None``: that of the first processor, if it takes only one.

    Raises:
        LegalizationError: no processors, an input type that cannot be inferred or is not accepted, or a
            processor that returns no steps, or steps of another type.
    """
    if not processors:
        raise LegalizationError("Pipeline cannot be empty")
    current = infer_initial_type(processors) if input_type is None else input_type
    ops: list[Op] = []
    for number, processor in enumerate(processors):
        inputs = types_of(processor)
        if current not in inputs:
            wanted = " or ".join(one.name for one in inputs) or "a processor that takes a type"
            raise LegalizationError(f"processor {number} ({processor!r}): got {current.name}, wanted {wanted}")
        steps = processor.legalize(current)
        if not isinstance(steps, Sequence) or not steps or not all(isinstance(step, Op) for step in steps):
            raise LegalizationError(
                f"processor {number} ({processor!r}): got {steps!r} of legalize, wanted a list of Op"
            )
        ops += steps
        current = ops[-1].OUT
    return ops
