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


def can_be_looked_at(tensor: torch.Tensor) -> bool:
    """Whether values cost nothing to look at: on the CPU, of a tensor that stands for nothing else."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
