"""What functions of every family say of arguments that are no tensors, or no dense ones, before an operator sees them."""

from __future__ import annotations

import torch


def check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{op}: {name}: got a tensor of {x.layout} and {x.dtype}, wanted a dense one")


def check_dims(op: str, name: str, x: torch.Tensor, wanted: int) -> None:
    check_tensor(op, name, x)
    if x.dim() != wanted:
        raise ValueError(f"{op}: {name}: got {x.dim()} dimensions, wanted {wanted}")
