"""Checks of arguments before an operator sees them: dense tensors, their dimensions, shapes, dtypes and devices."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called


def check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{called(op)}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{called(op)}: {name}: got a tensor of {x.layout} and {x.dtype}, wanted a dense one")


def check_dims(op: str, name: str, x: torch.Tensor, wanted: int) -> None:
    check_tensor(op, name, x)
    if x.dim() != wanted:
        raise ValueError(f"{called(op)}: {name}: got {x.dim()} dimensions, wanted {wanted}")


def check_form(
    op: str, name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype
) -> None:
    """A tensor of this shape, on this device and of one of these dtypes."""
    check_tensor(op, name, x)
    if is_dynamo_compiling() and x.dim() == len(shape):
        for got, wanted in zip(x.shape, shape, strict=True):
            torch._check(got == wanted)  # sizes of which nothing is known yet are compared when the graph runs
    elif x.shape != shape:
        raise ValueError(f"{called(op)}: {name}: got shape {list(x.shape)}, wanted {list(shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{called(op)}: {name}: got {x.dtype}, wanted {' or '.join(map(str, dtypes))}")
    if x.device != device:
        raise ValueError(f"{called(op)}: {name}: got a tensor on {x.device}, wanted one on {device}")


def can_be_looked_at(tensor: torch.Tensor) -> bool:
    """Whether values cost nothing to look at: on the CPU, of a tensor that stands for nothing else."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
