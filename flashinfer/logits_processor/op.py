"""Steps of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .types import TaggedTensor, TensorType


class Op:
    """One step from a tensor of type ``IN`` to one of type ``OUT``.

    A subclass defines ``IN``, ``OUT`` and either :meth:`run`, from tensor to tensor, or ``__call__``, from
    :class:`TaggedTensor` to :class:`TaggedTensor`.
    """

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]

    def __init__(self, **params: Any) -> None:
        self.params = params

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self).__name__

    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        """Compute the step with the parameters of a call.

        Raises:
            TypeError: the subclass defines neither this nor ``__call__``.
        """
        raise TypeError(f"{self.name}: got a class without run or __call__, wanted one of them")

    def __call__(self, tensor: TaggedTensor, **runtime: Any) -> TaggedTensor:
        """Run the step.

        Raises:
            ValueError: a tensor of another type than ``IN``.
        """
        if tensor.type != self.IN:
            raise step_error(self, "tensor", tensor.type.name, self.IN.name)
        return TaggedTensor(self.run(tensor.data, runtime), self.OUT)

    def __repr__(self) -> str:
        return self.name


def step_error(op: Op, name: str, got: object, wanted: object) -> ValueError:
    """Return the error for a parameter of a step. It names the step instead of the called function."""
    return ValueError(f"{op.name}: {name}: got {got}, wanted {wanted}")


class ParameterizedOp(Op):
    """A step with parameters from the call or from the constructor."""

    def parameter(self, name: str, runtime: dict[str, Any]) -> Any:
        """Return a parameter of this call: a number or a tensor.

        Raises:
            ValueError: it is missing, is neither a number nor a tensor, or is outside of the range of a
                builtin parameter.
        """
        value = runtime.get(name, self.params.get(name))
        if value is None:
            raise step_error(self, name, None, "a number or a tensor")
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise step_error(self, name, type(value).__name__, "a number or a tensor")
        wanted, fits = _RANGES.get(name, ("a number", lambda x: True))
        if not fits(value):
            raise step_error(self, name, value, wanted)
        return value


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a positive number", lambda x: x > 0),
    "top_k": ("a positive integer", lambda x: isinstance(x, int) and x > 0),
    "top_p": ("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "min_p": ("a number above 0, at most 1", lambda x: 0 < x <= 1),
}
