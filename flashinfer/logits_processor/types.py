"""Values in a pipeline: a tensor and the type of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class TensorType(Enum):
    """Logits, probabilities, or indices of tokens."""

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


def _bare(value: Any) -> Any:
    if isinstance(value, TaggedTensor):
        return value.data
    if isinstance(value, list | tuple):
        return type(value)(_bare(one) for one in value)
    return value


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor with the type of its numbers. torch's functions use it like the tensor itself."""

    data: torch.Tensor
    type: TensorType

    @classmethod
    def logits(cls, data: torch.Tensor) -> TaggedTensor:
        """Return a tensor of logits, ``[batch_size, vocab_size]``."""
        return cls(data, TensorType.LOGITS)

    @classmethod
    def probs(cls, data: torch.Tensor) -> TaggedTensor:
        """Return a tensor of probabilities, ``[batch_size, vocab_size]``."""
        return cls(data, TensorType.PROBS)

    @classmethod
    def indices(cls, data: torch.Tensor) -> TaggedTensor:
        """Return a tensor of tokens, ``[num_outputs]``."""
        return cls(data, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.data.dtype

    def size(self, dim: int | None = None) -> Any:
        """Return the tensor's size."""
        return self.data.size() if dim is None else self.data.size(dim)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_bare(tuple(args)), **{name: _bare(value) for name, value in (kwargs or {}).items()})
