"""Torch's own checks of an operator, with warnings as errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def opcheck(operator: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> None:
    """Run ``torch.library.opcheck``.

    Since torch 2.14 it reads ``.grad`` of its copies of differentiable arguments, which are no leaves. Torch
    hides that warning, but a filter that makes warnings errors comes first.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        torch.library.opcheck(operator, arguments, **options)
