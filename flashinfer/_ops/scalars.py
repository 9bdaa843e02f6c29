"""Numbers as inputs of a graph, so that one graph serves all their values.

torch compiles a Python number into a graph as a constant, and then makes another graph for each value. A tensor is an
input of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling


def is_symbolic(number: float) -> bool:
    """Return whether a number is an input of the graph that is being traced."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(number)


def as_tensor(number: float, device: torch.device) -> torch.Tensor:
    """Return a number as a float64 tensor of one element. With ``torch.full`` it would be a constant of the graph."""
    return torch.ones((), dtype=torch.float64, device=device) * number


def numbers_of(options: Sequence[float], factor: float | torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return the numbers of an attention call as one tensor, or ``None`` if all are constants of the graph.

    Args:
        options: logits_soft_cap, sm_scale, rope_scale, rope_theta.
        factor: multiplies sm_scale.

    Returns:
        ``[4]`` float64 on ``device``: sm_scale, logits_soft_cap, rope_scale, rope_theta.
    """
    if not isinstance(factor, torch.Tensor) and not any(is_symbolic(number) for number in (*options, factor)):
        return None
    cap, scale, rope_scale, rope_theta = (as_tensor(number, device) for number in options)
    return torch.stack([scale * factor, cap, rope_scale, rope_theta])


def scalar(number: float, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Return the two arguments of an operator that takes a number or a tensor."""
    if is_dynamo_compiling() and is_symbolic(number):
        return 0.0, as_tensor(number, device)
    return number, None


def scale_or_tensor(scale: float | torch.Tensor, like: object) -> tuple[float, torch.Tensor | None]:
    """Return the two arguments of an operator for a scale that is a number or a tensor of one element.

    Args:
        scale: number or tensor. The operator rejects other types.
        like: tensor on the device of the operator.
    """
    if isinstance(scale, torch.Tensor):
        return 1.0, scale
    return scalar(scale, like.device) if isinstance(like, torch.Tensor) else (1.0, None)
