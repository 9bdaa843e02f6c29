"""Memory for the intermediate tensors of a mixture of experts: a caller's buffer, or torch's allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .._ops.tensors import check_tensor

ALIGNMENT = 128  # bytes


def aligned_bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Return the bytes of tensors of these shapes, each at a multiple of 128."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)


def check_workspace(function: str, buffer: torch.Tensor, device: torch.device, least: int) -> None:
    """Check a caller's buffer before anything is launched.

    Raises:
        ValueError: no contiguous vector, another device, too few bytes, or a start that is no multiple of 128.
        TypeError: no bytes.
    """
    name = f"{function}: workspace_buffer"
    check_tensor(function, "workspace_buffer", buffer)
    if buffer.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{name}: got {buffer.dtype}, wanted torch.uint8 or torch.int8")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        got = f"shape {list(buffer.shape)} and strides {list(buffer.stride())}"
        raise ValueError(f"{name}: got {got}, wanted a contiguous vector")
    if buffer.device != device:
        raise ValueError(f"{name}: got one on {buffer.device}, wanted input's device, {device}")
    if buffer.storage_offset() % ALIGNMENT:
        raise ValueError(f"{name}: got a start at byte {buffer.storage_offset()}, wanted a multiple of {ALIGNMENT}")
    if buffer.numel() < least:
        raise ValueError(f"{name}: got {buffer.numel()} bytes, wanted at least {least}")


class Workspace:
    """Slices of a buffer, one after the other; new tensors where there is no buffer."""

    def __init__(self, buffer: torch.Tensor | None = None) -> None:
        self._buffer, self._used = buffer, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for a contiguous tensor."""
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        start = self._used
        self._used += aligned_bytes([shape], dtype)
        return self._buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
