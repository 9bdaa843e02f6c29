"""Routing: the experts of each token, and their weights."""

from __future__ import annotations

from enum import IntEnum

import torch

from .._ops.tensors import check_dims, check_tensor
from . import operators

MAX_TOP_K = 32


class RoutingMethodType(IntEnum):
    """How scores become experts and weights. The numbers are FlashInfer's."""

    Default = 0  # softmax, then top k
    Renormalize = 1  # top k, then softmax over them
    DeepSeekV3 = 2  # sigmoid, top k of it and a bias in the best groups, renormalised
    Llama4 = 3  # top k, then sigmoid
    RenormalizeNaive = 4  # softmax, top k, renormalised
    TopK = 5  # top k alone
    SigmoidRenorm = 6  # sigmoid, top k, renormalised
    MiniMax2 = 7  # sigmoid, top k of it and a bias, renormalised
    Sigmoid = 8  # sigmoid, then top k


def route(
    logits: torch.Tensor,
    top_k: int,
    method: RoutingMethodType = RoutingMethodType.Default,
    *,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``top_k`` experts for each token.

    Args:
        logits: ``[tokens, experts]`` (float32, float16, bfloat16), the last dimension contiguous. Scores are computed in
            float32; NaN counts as ``-inf``.
        top_k: 1 to 32.
        method: how.
        bias: ``[experts]``, added to scores where experts are chosen, and not to weights.
        n_group: experts lie in so many groups of equal size, at most 32. A group's score is that of its best expert,
            with methods of sigmoids the sum of its best two.
        topk_group: experts are chosen in so many of the best groups.
        routed_scaling_factor: of weights.

    Returns:
        ``(weights, ids)``: float32 and int32 ``[tokens, top_k]``, descending by what chose them: scores and bias with a
        bias or groups, logits else. Ties go to the smaller number. Experts at ``-inf`` are never chosen: where fewer
        than ``top_k`` are left, ids are -1 and weights 0.

    Raises:
        ValueError: shapes, devices or numbers that do not fit.
        TypeError: dtypes that do not fit.
        GradientError: logits want a gradient.
    """
    check_dims("route", "logits", logits, 2)
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"route: top_k: got {top_k}, wanted 1 to {MAX_TOP_K}")
    weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)
    numbers = None if bias is None else bias.to(torch.float32).contiguous()
    operators.route(weights, ids, logits, numbers, int(method), n_group, topk_group, routed_scaling_factor)
    return weights, ids


def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: torch.Tensor | None = None,
) -> None:
    """DeepSeek-V3's routing, :func:`route` with ``RoutingMethodType.DeepSeekV3``, into tensors of the caller.

    Args:
        scores: ``[tokens, experts]``, logits.
        bias: ``[experts]``.
        topk_values: ``[tokens, topk]`` float32, receives weights.
        topk_indices: ``[tokens, topk]`` int32 or int64, receives experts.
        launch_with_pdl: accepted; kernels overlap where the GPU can.
        routing_replay_out: ``[tokens, topk]`` of integers, receives the experts too.

    Raises:
        ValueError, TypeError: as :func:`route`.
    """
    given = {"scores": scores, "bias": bias, "topk_values": topk_values, "topk_indices": topk_indices}
    for name, tensor in given.items():
        check_tensor("fused_topk_deepseek", name, tensor)
    if topk_values.dim() == 2 and topk_values.shape[1] != topk:
        raise ValueError(f"fused_topk_deepseek: topk_values: got {topk_values.shape[1]} columns, wanted topk, {topk}")
    numbers = bias.to(torch.float32).contiguous()
    method = int(RoutingMethodType.DeepSeekV3)
    operators.route(
        topk_values, topk_indices, scores, numbers, method, n_group, topk_group, routed_scaling_factor
    )  # fmt: skip
    if routing_replay_out is not None:
        routing_replay_out.copy_(topk_indices)
