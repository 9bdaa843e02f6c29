"""Memory for the intermediate tensors of a mixture of experts: a caller's buffer, or torch's allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .._ops.errors import value_error
from .._ops.numbers import check_range
from .._ops.tensors import check_device, check_vector

ALIGNMENT = 128  # bytes


def aligned_bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Return the bytes of tensors of these shapes, each at a multiple of 128."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)


def check_workspace(function: str, buffer: torch.Tensor, device: torch.device, least: int) -> None:
    """Check a caller's buffer before anything is launched.

    Raises:
        ValueError: no contiguous vector, another device, too few bytes, or a start that is no multiple of
            128.
        TypeError: no bytes.
    """
    name = "workspace_buffer"
    check_vector(function, name, buffer, torch.uint8, torch.int8)
    check_device(function, name, buffer, device, " as input is")
    if buffer.storage_offset() % ALIGNMENT:
        raise value_error(function, name, f"a start at byte {buffer.storage_offset()}", f"a multiple of {ALIGNMENT}")
    check_range(function, name, buffer.numel(), least, unit="bytes")


class Workspace:
    """Consecutive slices of a buffer, or new tensors without a buffer."""

    def __init__(self, buffer: torch.Tensor | None = None) -> None:
        self._buffer, self._used = buffer, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for a contiguous tensor."""
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        start = self._used
        self._used += aligned_bytes([shape], dtype)
        return self._buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
