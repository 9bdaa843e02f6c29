"""Numbers that users vary, in graphs that are compiled once for all of their values.

A Python number passed to an operator is compiled into the graph, once for each value; as a tensor it is an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling


def is_symbolic(number: float) -> bool:
    """Whether a graph that is being traced has an input in the place of this number."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(number)


def as_tensor(number: float, device: torch.device) -> torch.Tensor:
    """A number as the element of a float64 tensor, symbolic still; ``torch.full`` would compile it into the graph."""
    return torch.ones((), dtype=torch.float64, device=device) * number


def numbers_of(given: Sequence[float], factor: float | torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Numbers of attention as kernels take them where they are values of a device; ``None``: a graph knows them all.

    Args:
        given: logits_soft_cap, sm_scale, rope_scale, rope_theta.
        factor: of sm_scale.

    Returns:
        ``[4]`` float64 on ``device``: sm_scale, logits_soft_cap, rope_scale, rope_theta.
    """
    if not isinstance(factor, torch.Tensor) and not any(is_symbolic(number) for number in (*given, factor)):
        return None
    cap, scale, rope_scale, rope_theta = (as_tensor(number, device) for number in given)
    return torch.stack([scale * factor, cap, rope_scale, rope_theta])


def scalar(number: float, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """A number for an operator that takes it either way: itself, or a tensor that stands for it."""
    if is_dynamo_compiling() and is_symbolic(number):
        return 0.0, as_tensor(number, device)
    return number, None
