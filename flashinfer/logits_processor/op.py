"""The steps that processors become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .types import TaggedTensor, TensorType


class Op(ABC):
    """One step: takes a tensor of type ``IN`` and returns one of type ``OUT``."""

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]

    def __init__(self, **params: Any) -> None:
        self.params = params

    @property
    def name(self) -> str:
        """The class's."""
        return type(self).__name__

    @abstractmethod
    def run(self, tensor: torch.Tensor, runtime: dict[str, Any]) -> torch.Tensor:
        """What the step computes, with the parameters of a call."""

    def __call__(self, tensor: TaggedTensor, **runtime: Any) -> TaggedTensor:
        if tensor.type != self.IN:
            raise ValueError(f"{self.name}: got a tensor of {tensor.type.name}, wanted {self.IN.name}")
        return TaggedTensor(self.run(tensor.data, runtime), self.OUT)

    def __repr__(self) -> str:
        return self.name


class ParameterizedOp(Op):
    """A step with parameters that a call gives, or the constructor where the call does not."""

    def parameter(self, name: str, runtime: dict[str, Any]) -> Any:
        """Of this call.

        Raises:
            ValueError: nobody has given it, or a number that cannot be.
        """
        value = runtime.get(name, self.params.get(name))
        if value is None:
            raise ValueError(f"{self.name}: needs the parameter {name}")
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.name}: {name}: got {type(value).__name__}, wanted a number or a tensor")
        wanted = _WANTED[name]
        if not wanted[1](value):
            raise ValueError(f"{self.name}: {name}: got {value}, wanted {wanted[0]}")
        return value


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a positive number", lambda x: x > 0),
    "top_k": ("a positive integer", lambda x: isinstance(x, int) and x > 0),
    "top_p": ("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "min_p": ("a number above 0, at most 1", lambda x: 0 < x <= 1),
}
