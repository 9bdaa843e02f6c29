"""Parameters of filters: a number for all rows, or a tensor with one number per row or per output."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.errors import type_error, value_error
from .._ops.numbers import check_real
from .._ops.scalars import as_tensor, is_symbolic
from .._ops.tensors import check_dims, check_tensor
from ..jit.frozen import refuse_capture

Real = float | torch.Tensor
Integer = int | torch.Tensor


def check_rows(op: str, name: str, given: object, dims: int = 2) -> None:
    """Check that an argument is a dense tensor of ``dims`` dimensions."""
    check_dims(op, name, given, dims)  # type: ignore[arg-type]


def real_of(op: str, name: str, given: Real, rows: int, outputs: int) -> tuple[torch.Tensor | None, float]:
    """Return ``None`` and a number, or a float32 or float64 tensor and 0."""
    if isinstance(given, torch.Tensor):
        _check_list(op, name, given, rows, outputs)
        return (given if given.dtype in (torch.float32, torch.float64) else given.float()), 0.0
    if isinstance(given, bool) or not isinstance(given, int | float | torch.SymFloat | torch.SymInt):
        raise type_error(op, name, type(given).__name__, "float or Tensor")
    return None, float(given)


def traced(number: tuple[torch.Tensor | None, float], device: torch.device) -> tuple[torch.Tensor | None, float]:
    """Return a symbolic number as a tensor. One graph then serves all its values."""
    tensor, value = number
    if tensor is None and is_dynamo_compiling() and is_symbolic(value):
        return as_tensor(value, device).reshape(1), 0.0
    return number


def integer_of(op: str, name: str, given: Integer, rows: int, outputs: int) -> tuple[torch.Tensor | None, int]:
    """Return ``None`` and a number, or an int32 or int64 tensor and -1."""
    if isinstance(given, torch.Tensor):
        _check_list(op, name, given, rows, outputs)
        return (given if given.dtype in (torch.int32, torch.int64) else given.long()), -1
    if type(given) is int:
        return None, given
    if isinstance(given, bool) or not isinstance(given, int | float | torch.SymInt):
        raise type_error(op, name, type(given).__name__, "int or Tensor")
    if isinstance(given, float) and not float(given).is_integer():
        raise value_error(op, name, given, "an integer")
    return None, int(given)


def _check_list(op: str, name: str, given: torch.Tensor, rows: int, outputs: int) -> None:
    """Check a tensor of numbers. The second half of each text equals FlashInfer's, because callers match it."""
    check_tensor(op, name, given)
    check_real(op, name, given)
    text = ""
    if given.dim() == 0:
        text = (
            "Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, "
            "but got a 0-dimensional tensor."
        )
    elif given.dim() != 1:
        text = f"Expected a 1D tensor or scalar for the sampling parameter, but got a {given.dim()}D tensor."
    elif given.shape[0] not in (rows, outputs):
        text = f"Sampling parameter tensor batch size mismatch: expected length {outputs}, got {given.shape[0]}."
    if text:
        raise ValueError(f"{op}: {name}: {text}")


def refuse_nan(name: str, given: torch.Tensor) -> None:
    """Raise an error for a NaN. The host waits for the device."""
    if not is_dynamo_compiling():
        refuse_capture(f"check_nan of {name}: the host would wait for the device", "call it, or omit check_nan,")
    if torch.any(torch.isnan(given)).item():
        raise ValueError(f"Input {name} contains NaN.")
