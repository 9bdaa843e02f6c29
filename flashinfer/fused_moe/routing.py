"""Routing: the experts of each token, and their weights."""

from __future__ import annotations

import torch

from .._ops.errors import renamed
from .._ops.numbers import check_real
from .._ops.sizes import exceeds
from .._ops.tensors import check_dims, check_form, check_tensor
from ..tllm_enums import RoutingMethodType
from . import operators

MAX_TOP_K = 32


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
    """Choose ``top_k`` experts for each token.

    Args:
        logits: ``[tokens, experts]`` (float32, float16, bfloat16), the last dimension contiguous. Scores are computed in
            float32; NaN counts as ``-inf``.
        top_k: 1 to 32.
        method: a rule; every :class:`RoutingMethodType` but ``Unspecified``.
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
    numbers = None if bias is None else _numbers("route", bias)
    if method == RoutingMethodType.TopKSigmoid:
        method = RoutingMethodType.Llama4
    operators.route(weights, ids, logits, numbers, int(method), n_group, topk_group, routed_scaling_factor)
    return weights, ids


def _numbers(op: str, bias: torch.Tensor) -> torch.Tensor:
    check_tensor(op, "bias", bias)
    check_real(op, "bias", bias)
    return bias.to(torch.float32).contiguous()


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
    """Route as DeepSeek-V3 does, :func:`route` with ``RoutingMethodType.DeepSeekV3``, into tensors of the caller.

    Args:
        scores: ``[tokens, experts]``, logits.
        bias: ``[experts]``.
        topk_values: ``[tokens, topk]``, float32 or of scores' dtype, receives weights.
        topk_indices: ``[tokens, topk]`` int32 or int64, receives experts.
        launch_with_pdl: accepted; kernels overlap where the GPU can.
        routing_replay_out: ``[at least tokens, topk]`` of signed integers that hold every expert's number; its first
            rows receive the experts too.

    Raises:
        ValueError, TypeError: as :func:`route`.
    """
    name = "fused_topk_deepseek"
    given = {"scores": scores, "bias": bias, "topk_values": topk_values, "topk_indices": topk_indices}
    for argument, tensor in given.items():
        check_tensor(name, argument, tensor)
    check_dims(name, "scores", scores, 2)
    shape = (scores.shape[0], topk)
    check_form(name, "bias", bias, scores.shape[1:], scores.device, bias.dtype)
    check_form(name, "topk_values", topk_values, shape, scores.device, torch.float32, scores.dtype)
    check_form(name, "topk_indices", topk_indices, shape, scores.device, torch.int32, torch.int64)
    if routing_replay_out is not None:
        _check_replay(name, routing_replay_out, scores, topk)
    numbers = _numbers(name, bias)
    method = int(RoutingMethodType.DeepSeekV3)
    try:
        operators.route(topk_values, topk_indices, scores, numbers, method, n_group, topk_group, routed_scaling_factor)
    except (ValueError, TypeError) as err:
        names = {"logits": "scores", "weights": "topk_values", "ids": "topk_indices"}
        raise renamed(err, names) from None
    if routing_replay_out is not None:
        routing_replay_out[: scores.shape[0]].copy_(topk_indices)


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _check_replay(name: str, replay: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
    """Check a buffer for the experts of at least the tokens of ``scores``."""
    check_dims(name, "routing_replay_out", replay, 2)
    rows = replay.shape[0]
    check_form(name, "routing_replay_out", replay, (rows, topk), scores.device, *_SIGNED)
    if exceeds(scores.shape[0], rows):
        raise ValueError(f"{name}: routing_replay_out: got {rows} rows, wanted at least {scores.shape[0]}")
    if exceeds(scores.shape[1] - 1, torch.iinfo(replay.dtype).max):
        raise TypeError(f"{name}: routing_replay_out: got {replay.dtype}, wanted integers up to {scores.shape[1] - 1}")
