"""Processors of a pipeline. Each becomes steps for the type of its input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from .op import Op
from .operators import (
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)
from .types import TensorType


class LogitsProcessor(ABC):
    """A part of a pipeline: :meth:`legalize` returns its steps for the type of its input.

    ``INPUTS`` lists the types that it accepts. ``None``, the default, means every type for which ``legalize``
    returns steps and raises no ``ValueError`` (such as ``LegalizationError``).
    """

    INPUTS: ClassVar[tuple[TensorType, ...] | None] = None

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abstractmethod
    def legalize(self, input_type: TensorType) -> list[Op]:
        """Return the steps for a tensor of this type, one of ``INPUTS``."""

    def __repr__(self) -> str:
        return type(self).__name__


class Temperature(LogitsProcessor):
    """Divide logits by ``temperature``, a parameter of the call: a positive number, or ``[batch_size]``."""

    INPUTS = (TensorType.LOGITS,)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [TemperatureOp(**self.params)]


class Softmax(LogitsProcessor):
    """Logits to probabilities, in float32."""

    INPUTS = (TensorType.LOGITS,)

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [SoftmaxOp(**self.params)]


class TopK(LogitsProcessor):
    """Keep the ``top_k`` largest, a parameter of the call.

    With ``joint_topk_topp`` a following TopP filters the input of this processor.
    """

    INPUTS = (TensorType.LOGITS, TensorType.PROBS)

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [(LogitsTopKOp if input_type == TensorType.LOGITS else ProbsTopKOp)(**self.params)]


class TopP(LogitsProcessor):
    """Keep the fewest most probable tokens with a mass of ``top_p``, a parameter of the call."""

    INPUTS = (TensorType.PROBS,)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [TopPOp(**self.params)]


class MinP(LogitsProcessor):
    """Keep the tokens with at least ``min_p`` times the largest probability, a parameter of the call."""

    INPUTS = (TensorType.PROBS,)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [MinPOp(**self.params)]


class Sample(LogitsProcessor):
    """Draw a token of each row.

    ``indices``, ``generator``, ``seed``, ``offset`` and ``slot`` are optional parameters.
    """

    INPUTS = (TensorType.LOGITS, TensorType.PROBS)

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return [(LogitsSampleOp if input_type == TensorType.LOGITS else ProbsSampleOp)(**self.params)]
