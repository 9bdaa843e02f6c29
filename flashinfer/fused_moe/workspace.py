"""Memory for the intermediate tensors of a mixture of experts: a caller's buffer, or torch's allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .._ops.errors import value_error
from .._ops.tensors import check_dtype, check_tensor

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
    check_tensor(function, name, buffer)
    check_dtype(function, name, buffer.dtype, (torch.uint8, torch.int8))
    if buffer.dim() != 1 or not buffer.is_contiguous():
        got = f"shape {list(buffer.shape)} and strides {list(buffer.stride())}"
        raise value_error(function, name, got, "a contiguous vector")
    if buffer.device != device:
        raise value_error(function, name, f"one on {buffer.device}", f"input's device, {device}")
    if buffer.storage_offset() % ALIGNMENT:
        raise value_error(function, name, f"a start at byte {buffer.storage_offset()}", f"a multiple of {ALIGNMENT}")
    if buffer.numel() < least:
        raise value_error(function, name, f"{buffer.numel()} bytes", f"at least {least}")


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
