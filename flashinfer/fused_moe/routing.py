"""Routing: the experts of each token, and their weights."""

from __future__ import annotations

import torch

from .._compat.backends import serves_backends
from .._ops.errors import call_as, type_error
from .._ops.numbers import check_range, check_real
from .._ops.shapes import check_tensors
from .._ops.sizes import exceeds
from .._ops.tensors import check_dims, check_tensor
from ..tllm_enums import RoutingMethodType
from . import operators

MAX_TOP_K = 32
INDICES = (torch.int32, torch.int64)


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
        logits: ``[tokens, experts]`` (float32, float16, bfloat16), the last dimension contiguous. Scores are
            computed in float32; NaN counts as ``-inf``.
        top_k: 1 to 32.
        method: a rule; any :class:`RoutingMethodType` except ``Unspecified``.
        bias: ``[experts]``, added to scores to choose experts, and not to weights.
        n_group: number of groups of equal size, at most 32. A group's score is that of its best expert; with
            sigmoid methods it is the sum of its best two.
        topk_group: number of best groups from which experts are chosen.
        routed_scaling_factor: factor of the weights.

    Returns:
        ``(weights, ids)``: float32 and int32 ``[tokens, top_k]``, in descending order: by scores and bias
        with a bias or groups, otherwise by logits. Ties go to the smaller id. Experts at ``-inf`` are never
        chosen: if fewer than ``top_k`` are left, the other ids are -1 and weights 0.

    Raises:
        ValueError: invalid shapes, devices or numbers.
        TypeError: invalid dtypes.
        GradientError: logits require a gradient.
    """
    check_dims("route", "logits", logits, 2)
    check_range("route", "top_k", top_k, 1, MAX_TOP_K)
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


@serves_backends("default")
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
    backend: str = "default",
) -> None:
    """Route like DeepSeek-V3 into the caller's tensors: :func:`route` with ``RoutingMethodType.DeepSeekV3``.

    Args:
        scores: ``[tokens, experts]``, logits.
        bias: ``[experts]``.
        topk_values: ``[tokens, topk]``, float32 or of scores' dtype, receives weights.
        topk_indices: ``[tokens, topk]`` int32 or int64, receives experts.
        launch_with_pdl: accepted; kernels overlap if the GPU can.
        routing_replay_out: ``[at least tokens, topk]`` of signed integers that can hold every expert's id.
            Its first rows receive the experts too.
        backend: accepted for FlashInfer's callers.

    Raises:
        ValueError, TypeError: as :func:`route`.
    """
    name = "fused_topk_deepseek"
    check_tensors(
        name, scores=(scores, "t e"), bias=(bias, "e"), topk_indices=(topk_indices, f"t {topk}", INDICES),
        topk_values=(topk_values, f"t {topk}", (torch.float32, getattr(scores, "dtype", None))),
    )  # fmt: skip
    if routing_replay_out is not None:
        _check_replay(name, routing_replay_out, scores, topk)
    numbers = _numbers(name, bias)
    method = int(RoutingMethodType.DeepSeekV3)
    call_as(
        {"logits": "scores", "weights": "topk_values", "ids": "topk_indices"}, operators.route,
        topk_values, topk_indices, scores, numbers, method, n_group, topk_group, routed_scaling_factor,
    )  # fmt: skip
    if routing_replay_out is not None:
        routing_replay_out[: scores.shape[0]].copy_(topk_indices)


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _check_replay(name: str, replay: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
    """Check a buffer for the experts of at least the tokens of ``scores``."""
    check_tensors(name, scores=(scores, None), routing_replay_out=(replay, "_ _", _SIGNED))
    check_tensors(name, routing_replay_out=(replay, (replay.shape[0], topk)))
    check_range(name, "routing_replay_out", replay.shape[0], scores.shape[0], unit="rows")
    if exceeds(scores.shape[1] - 1, torch.iinfo(replay.dtype).max):
        raise type_error(name, "routing_replay_out", replay.dtype, f"integers up to {scores.shape[1] - 1}")
