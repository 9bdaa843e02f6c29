"""Checks and views of arguments that TensorRT-LLM's functions take as flat tensors."""

from __future__ import annotations

import torch

from ..._ops.errors import value_error
from ..._ops.tensors import check_tensor


def required(op: str, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise value_error(op, name, None, "a tensor")
    check_tensor(op, name, tensor)
    return tensor


def as_rows(op: str, name: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    check_tensor(op, name, tensor)
    if not tensor.is_contiguous() or tensor.numel() != rows * columns:
        raise value_error(op, name, f"shape {list(tensor.shape)}", f"{rows * columns} contiguous elements")
    return tensor.view(rows, columns)


def as_fp8(op: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    check_tensor(op, "quant_out", tensor)
    count = rows * columns
    if not tensor.is_contiguous() or tensor.numel() * tensor.itemsize < count:
        raise value_error(op, "quant_out", f"shape {list(tensor.shape)}", f"at least {count} contiguous bytes")
    return tensor.view(-1).view(torch.uint8)[:count].view(torch.float8_e4m3fn).view(rows, columns)
