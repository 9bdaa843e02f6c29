"""Indices of the largest scores of rows, as slots of a page table or of a ragged array."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.arguments import check_present
from .._ops.errors import check_one_device, value_error
from .._ops.numbers import positive
from .._ops.shapes import check_tensors
from .parameters import check_rows
from .top_k import takes_last, top_k

_LARGEST_PAGE = 1 << 30


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
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the slots of a paged cache that hold the ``k`` largest scores of each row (sparse attention).

    The slot of index ``i`` of row ``r`` is ``table[b, s + i // page_size] * page_size + i % page_size``, with
    ``b = row_to_batch[r]`` and ``s = page_table_row_starts[r]``.

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        src_page_table: ``[batch_size, max_pages]`` int32.
        lengths: number of scores of each row, ``[num_rows]`` int32 or int64.
        k: number of indices.
        row_to_batch: row of the page table for each row, ``[num_rows]``; ``None``: the same row.
        deterministic, dsa_graph_safe: accepted. Results are always the same, and nothing waits for the
            device.
        tie_break: a :class:`flashinfer.TopKTieBreak`, for scores equal to the last one.
        row_starts: column of each row's first score, ``[num_rows]``; ``None``: 0. Indices count from it.
        page_table_row_starts: entry of the page table for each row's first page, ``[num_rows]``; ``None``:
            ``row_starts``.
        page_size: slots of a page, a power of two up to 2^30.
        out: ``[num_rows, k]`` int32, contiguous, receives the result.
        out_raw_indices: like ``out``, receives the indices themselves, in the same order.

    Returns:
        ``out``, or a new ``[num_rows, k]`` int32: slots by ascending index, then -1.

    Raises:
        ValueError: an invalid shape, ``k``, ``tie_break`` or ``page_size``; ``row_starts`` with pages of more
            than one slot and without ``page_table_row_starts``; outputs that overlap each other or an input.
        TypeError: invalid dtypes.
    """
    op = "top_k_page_table_transform"
    inputs = dict(
        input=input, src_page_table=src_page_table, lengths=lengths, row_to_batch=row_to_batch, row_starts=row_starts,
        page_table_row_starts=page_table_row_starts,
    )  # fmt: skip
    outputs = dict(out=out, out_raw_indices=out_raw_indices)
    check_one_device(op, (*inputs, *outputs), (*inputs.values(), *outputs.values()))
    check_rows(op, "input", input)
    check_tensors(op, src_page_table=(src_page_table, "_ _", (torch.int32,)))
    if not 1 <= page_size <= _LARGEST_PAGE or page_size & (page_size - 1):
        raise value_error(op, "page_size", page_size, f"a power of two from 1 to {_LARGEST_PAGE}")
    if page_size > 1 and row_starts is not None:
        why = "entries in addition to row_starts for page_size > 1"
        check_present(op, "page_table_row_starts", page_table_row_starts, why)
    rows = input.shape[0]
    if row_to_batch is None:
        _check_size(op, "src_page_table", src_page_table.shape[0], rows)
    else:
        _check_list(op, "row_to_batch", row_to_batch, input)
    if page_table_row_starts is not None:
        _check_list(op, "page_table_row_starts", page_table_row_starts, input)
    positive(op, "k", k)
    _check_outputs(op, (rows, k), tuple(inputs.values()), **outputs)
    indices, inside = _largest(op, input, lengths, k, row_starts, tie_break)
    batch = torch.arange(rows, device=input.device) if row_to_batch is None else row_to_batch.long()
    entries = indices // page_size
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    if first is not None:
        entries = entries + first[:, None]
    pages = src_page_table[batch[:, None], entries.clamp(max=src_page_table.shape[1] - 1)]
    slots = torch.where(inside, pages * page_size + indices % page_size, -1).int()
    if out_raw_indices is not None:
        out_raw_indices.copy_(torch.where(inside, indices, -1))
    return slots if out is None else out.copy_(slots)


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
    """Return the indices of the ``k`` largest scores of each row, plus the row's offset (sparse attention).

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        offsets: numbers that are added to each row's indices, ``[num_rows]`` int32 or int64.
        lengths: number of scores of each row, ``[num_rows]`` int32 or int64.
        k: number of indices.
        row_starts: column of each row's first score, ``[num_rows]``; ``None``: 0. Indices count from it.
        deterministic, tie_break, dsa_graph_safe: as for :func:`top_k_page_table_transform`.

    Returns:
        ``[num_rows, k]`` int32 in ascending order, then -1.

    Raises:
        ValueError: an invalid shape, ``k`` or ``tie_break``.
        TypeError: invalid dtypes.
    """
    op = "top_k_ragged_transform"
    names = ("input", "offsets", "lengths", "row_starts")
    check_one_device(op, names, (input, offsets, lengths, row_starts))
    check_rows(op, "input", input)
    _check_list(op, "offsets", offsets, input)
    indices, inside = _largest(op, input, lengths, k, row_starts, tie_break)
    return torch.where(inside, indices + offsets[:, None], -1).int()


def _check_list(op: str, name: str, table: torch.Tensor, rows: torch.Tensor) -> None:
    check_tensors(op, **{name: (table, "_", (torch.int32, torch.int64))})
    _check_size(op, name, table.shape[0], rows.shape[0])


def _check_size(op: str, name: str, got: int, wanted: int) -> None:
    if is_dynamo_compiling():
        torch._check(got == wanted)  # the graph compares sizes that are still unknown when it runs
    elif got != wanted:
        raise value_error(op, name, f"{got} rows", wanted)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share bytes of one storage."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not (one.numel() and other.numel()):
        return False
    ranges = []
    for tensor in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        ranges.append((start, start + (last + 1) * tensor.element_size()))
    return ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _check_outputs(
    op: str, shape: tuple[int, int], inputs: tuple[torch.Tensor | None, ...], **outputs: torch.Tensor | None
) -> None:
    """Reject outputs with another shape or dtype, and outputs that overlap an input or each other."""
    present = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    for name, tensor in present.items():
        check_tensors(op, **{name: (tensor, shape, (torch.int32,))})
        if not tensor.is_contiguous():
            raise value_error(op, name, f"strides {tensor.stride()}", "a contiguous tensor")
    if not present or is_dynamo_compiling():
        return
    others = [tensor for tensor in inputs if tensor is not None]
    for name, tensor in present.items():
        if any(_overlap(tensor, other) for other in others):
            raise value_error(op, name, "a tensor that overlaps another tensor", "separate memory")
        others.append(tensor)


def _largest(
    op: str, input: torch.Tensor, lengths: torch.Tensor, k: int, row_starts: torch.Tensor | None, tie_break: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[num_rows, k]`` indices in ascending order, and a mask of the valid ones."""
    _check_list(op, "lengths", lengths, input)
    last = takes_last(op, tie_break)
    width = input.shape[1]
    positive(op, "k", k)
    columns = torch.arange(width, device=input.device)
    if row_starts is not None:
        _check_list(op, "row_starts", row_starts, input)
        lengths = torch.minimum(lengths, width - row_starts)
    # top_k() gives ties to the first columns. To give them to the last columns, reverse the rows.
    source = (lengths[:, None] - 1 - columns).clamp(min=0) if last else columns
    if last or row_starts is not None:
        if row_starts is not None:
            source = source + row_starts[:, None]
        input = input.gather(1, source.clamp(max=width - 1).expand(input.shape))
    # Columns after the end of a row never win a tie, because all columns of the row come before them.
    scores = torch.where((columns < lengths[:, None]) & ~input.isnan(), input, -float("inf"))
    indices = top_k(scores, min(k, width))[1]
    inside = indices < lengths[:, None]
    if last:
        indices = torch.where(inside, lengths[:, None] - 1 - indices, width).sort(-1)[0]
        indices = torch.where(inside, indices, 0)
    if k > width:
        indices = torch.nn.functional.pad(indices, (0, k - width))
        inside = torch.nn.functional.pad(inside, (0, k - width))
    return indices, inside
