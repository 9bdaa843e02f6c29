"""Checks of tensors before an operator is called: dimensions, shapes, dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called, either, type_error, value_error
from .sizes import differs


def check_tensor(op: str, name: str, x: object) -> None:
    """Check that an argument is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise type_error(op, name, type(x).__name__, "Tensor")
    if x.layout != torch.strided:
        raise value_error(op, name, f"a tensor of {x.layout} and {x.dtype}", "a dense one")


def check_dims(op: str, name: str, x: torch.Tensor, wanted: int) -> None:
    """Check that an argument is a dense tensor with ``wanted`` dimensions."""
    check_tensor(op, name, x)
    if x.dim() != wanted:
        raise value_error(op, name, f"{x.dim()} dimensions", wanted)


def check_dtype(op: str, name: str, dtype: object, wanted: Sequence[torch.dtype]) -> None:
    """Check that a dtype is one of ``wanted``."""
    if dtype not in wanted:
        raise type_error(op, name, dtype, either(wanted))


def check_device(op: str, name: str, x: torch.Tensor, device: torch.device, why: str = "") -> None:
    """Check the device of a tensor.

    Raises:
        ValueError: another device.
    """
    if x.device != device:
        raise value_error(op, name, f"a tensor on {x.device}", f"one on {device}{why}")


def check_not_meta(op: str, name: str, x: torch.Tensor) -> None:
    """Check that the elements of a tensor can be read.

    Raises:
        ValueError: a tensor on meta.
    """
    if x.is_meta:
        raise value_error(op, name, "a meta tensor", "a tensor with elements")


def check_vector(op: str, name: str, x: object, *dtypes: torch.dtype) -> torch.Tensor:
    """Check that an argument is a contiguous vector, and return it. Kernels read or write it in place.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: not a dense tensor, or not a contiguous vector.
    """
    check_tensor(op, name, x)
    assert isinstance(x, torch.Tensor)
    check_dtype(op, name, x.dtype, dtypes)
    if x.dim() != 1 or not x.is_contiguous():
        got = f"shape {list(x.shape)} and strides {list(x.stride())}"
        raise value_error(op, name, got, "a contiguous vector")
    return x


def check_count(op: str, name: str, x: torch.Tensor, count: int, why: str = "") -> None:
    """Check the number of elements of a tensor.

    Raises:
        ValueError: another number.
    """
    if differs(x.numel(), count):
        raise value_error(op, name, f"{x.numel()} elements", f"{count}{why}")


def check_metadata(
    op: str, name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype
) -> None:
    """Check the metadata of a dense tensor: its shape, device and dtype."""
    check_tensor(op, name, x)
    if is_dynamo_compiling() and x.dim() == len(shape):
        for got, wanted in zip(x.shape, shape, strict=True):
            torch._check(got == wanted)  # the graph compares unknown sizes when it runs
    elif x.shape != shape:
        raise ValueError(f"{called(op)}: {name}: got shape {list(x.shape)}, wanted {list(shape)}")
    if x.dtype not in dtypes:
        check_dtype(op, name, x.dtype, dtypes)
    if x.device != device:
        check_device(op, name, x, device)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the host can read values without waiting. True for a plain CPU tensor outside of graphs."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
