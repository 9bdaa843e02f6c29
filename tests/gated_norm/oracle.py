"""RMSNorm with a gate in float64, and how large the terms are that its results are sums of."""

from __future__ import annotations

import torch

Options = dict[str, object]


def gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, activation="silu",
    norm_before_gate=True, group_size=None,
) -> torch.Tensor:  # fmt: skip
    act = gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid()
    u = x if norm_before_gate else x * act
    groups = u.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    return normed * weight * (act if norm_before_gate else 1)


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().cpu().double() for tensor in tensors]


def gradient_terms(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, activation="silu",
    norm_before_gate=True, group_size=None,
) -> list[torch.Tensor]:  # fmt: skip
    """Magnitudes for the gradients of x, gate and weight: sums of absolute values in the place of sums."""
    size = group_size or max(x.shape[-1], 1)
    sigmoid = gate.sigmoid()
    act = sigmoid if activation == "sigmoid" else gate * sigmoid
    slope = sigmoid * (1 - sigmoid) if activation == "sigmoid" else sigmoid * (1 + gate.abs() * (1 - sigmoid))
    grad, x, act, weight = grad.abs(), x.abs(), act.abs(), weight.abs()

    def mean(values: torch.Tensor) -> torch.Tensor:
        groups = values.unflatten(-1, (-1, size))
        return groups.mean(-1, keepdim=True).expand_as(groups).flatten(-2)

    u = x if norm_before_gate else x * act
    root = torch.rsqrt(mean(u * u) + eps)
    h = grad * weight * (act if norm_before_gate else 1)
    du = h * root + u * root**3 * mean(h * u)
    if norm_before_gate:
        terms = [du, grad * weight * x * root * slope, grad * x * root * act]
    else:
        terms = [du * act, du * x * slope, grad * u * root]
    terms[2] = terms[2].reshape(-1, x.shape[-1]).sum(0)
    return terms
