"""The places of the largest scores of rows of different lengths, as entries of a page table or of a ragged array."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.errors import check_one_device
from .filters import top_k
from .parameters import check_rows


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entries of a page table at the places of the ``k`` largest scores of each row (sparse attention).

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        src_page_table: ``[batch_size, max_len]`` int32.
        lengths: how many scores each row has, ``[num_rows]`` int32 or int64.
        k: how many are taken.
        row_to_batch: the page table's row of each row, ``[num_rows]``; ``None``: its own.
        row_starts: the column of each row's first score, ``[num_rows]``; ``None``: 0. Places are counted from it.
        deterministic, tie_break, dsa_graph_safe: accepted; results are always the same, ties go to the smallest places, and
            nothing waits for the device.

    Returns:
        ``[num_rows, k]`` int32 in the order of the places, -1 behind the last of rows shorter than ``k``.
    """
    check_one_device("top_k_page_table_transform", (input, src_page_table, lengths, row_to_batch, row_starts))
    places, inside = _places("top_k_page_table_transform", input, lengths, k, row_starts)
    check_rows("top_k_page_table_transform", "src_page_table", src_page_table)
    if src_page_table.dtype != torch.int32:
        raise TypeError(f"top_k_page_table_transform: src_page_table: got {src_page_table.dtype}, wanted torch.int32")
    rows = input.shape[0]
    if row_to_batch is None:
        _check_size("top_k_page_table_transform", "src_page_table", src_page_table.shape[0], rows)
    else:
        _check_list("top_k_page_table_transform", "row_to_batch", row_to_batch, input)
    batch = torch.arange(rows, device=input.device) if row_to_batch is None else row_to_batch.long()
    taken = src_page_table[batch[:, None], places.clamp(max=src_page_table.shape[1] - 1)]
    return torch.where(inside, taken, -1)


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Places of the ``k`` largest scores of each row, counted from the row's offset (sparse attention).

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        offsets: what is added to each row's places, ``[num_rows]`` int32 or int64.
        lengths: how many scores each row has, ``[num_rows]`` int32 or int64.
        k: how many are taken.
        row_starts: the column of each row's first score, ``[num_rows]``; ``None``: 0. Places are counted from it.
        deterministic, tie_break, dsa_graph_safe: see :func:`top_k_page_table_transform`.

    Returns:
        ``[num_rows, k]`` int32 in ascending order, -1 behind the last of rows shorter than ``k``.
    """
    check_one_device("top_k_ragged_transform", (input, offsets, lengths, row_starts))
    places, inside = _places("top_k_ragged_transform", input, lengths, k, row_starts)
    _check_list("top_k_ragged_transform", "offsets", offsets, input)
    return torch.where(inside, places + offsets[:, None], -1).int()


def _check_list(op: str, name: str, given: torch.Tensor, rows: torch.Tensor) -> None:
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name}: got {given.dtype}, wanted torch.int32 or torch.int64")
    if given.dim() != 1:
        raise ValueError(f"{op}: {name}: got {given.dim()} dimensions, wanted 1")
    _check_size(op, name, given.shape[0], rows.shape[0])


def _check_size(op: str, name: str, got: int, wanted: int) -> None:
    if is_dynamo_compiling():
        torch._check(got == wanted)  # sizes of which nothing is known yet are compared when the graph runs
    elif got != wanted:
        raise ValueError(f"{op}: {name}: got {got} rows, wanted {wanted}")


def _places(
    op: str, input: torch.Tensor, lengths: torch.Tensor, k: int, row_starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[num_rows, k]`` places in ascending order, and which of them the rows have."""
    check_rows(op, "input", input)
    _check_list(op, "lengths", lengths, input)
    width = input.shape[1]
    if k < 1:
        raise ValueError(f"{op}: k: got {k}, wanted 1 or more")
    columns = torch.arange(width, device=input.device)
    if row_starts is not None:
        _check_list(op, "row_starts", row_starts, input)
        input = input.gather(1, (columns + row_starts[:, None]).clamp(max=width - 1))
        lengths = torch.minimum(lengths, width - row_starts)
    # What is no score loses against every score: of those that tie the smallest places are taken.
    scores = torch.where((columns < lengths[:, None]) & ~input.isnan(), input, -float("inf"))
    places = top_k(scores, min(k, width))[1]
    inside = places < lengths[:, None]
    if k > width:
        places = torch.nn.functional.pad(places, (0, k - width))
        inside = torch.nn.functional.pad(inside, (0, k - width))
    return places, inside
