"""Top-k: the largest elements of rows, and the rule for ties with the k-th largest."""

from __future__ import annotations

import torch

from .._ops.codes import Code
from .._ops.errors import value_error
from . import operators
from .parameters import check_rows


class TopKTieBreak(Code):
    """Rule for elements equal to the k-th largest."""

    NONE = 0  # unspecified; here the smallest indices
    SMALL = 1  # the smallest indices
    LARGE = 2  # the largest indices


def takes_last(op: str, tie_break: int) -> bool:
    """Return whether ties go to the largest indices.

    Raises:
        ValueError: ``tie_break`` is not a value of ``TopKTieBreak``.
    """
    if tie_break not in (0, 1, 2):
        raise value_error(op, "tie_break", repr(tie_break), "a TopKTieBreak: 0, 1 or 2")
    return tie_break == TopKTieBreak.LARGE


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``k`` largest elements of each row.

    Args:
        input: ``[batch_size, n]``; NaN counts as the smallest.
        k: 1 to ``n``.
        sorted: largest first, equal ones by ascending index; otherwise all by ascending index.
        deterministic: accepted; results and their order are always the same.
        tie_break: a :class:`TopKTieBreak`, for elements equal to the last one.
        dsa_graph_safe: accepted; launches depend only on shapes, and nothing waits for the device.

    Returns:
        ``(values, indices)``: ``[batch_size, k]`` of ``input``'s dtype and int64.

    Raises:
        ValueError: another shape, ``k`` or ``tie_break``.
    """
    check_rows("top_k", "input", input)
    if takes_last("top_k", tie_break):
        values, indices = operators.top_k(input.flip(-1), k)
        values, indices = values.flip(-1), (input.shape[1] - 1 - indices).flip(-1)
    else:
        values, indices = operators.top_k(input, k)
    if sorted:
        values, order = values.sort(dim=-1, descending=True, stable=True)
        indices = indices.gather(-1, order)
    return values, indices


def can_implement_filtered_topk() -> bool:
    """Return ``True``: :func:`top_k` serves every length on every device."""
    return True
