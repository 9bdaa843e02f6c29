"""The places of the largest scores of rows of different lengths, as slots of a page table or of a ragged array."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.errors import check_one_device
from .._ops.tensors import check_tensor
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
    """Return slots of a paged cache at the places of the ``k`` largest scores of each row (sparse attention).

    The slot of place ``i`` of row ``r`` is ``table[b, s + i // page_size] * page_size + i % page_size``, with
    ``b = row_to_batch[r]`` and ``s = page_table_row_starts[r]``.

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        src_page_table: ``[batch_size, max_pages]`` int32.
        lengths: number of scores of each row, ``[num_rows]`` int32 or int64.
        k: number of places.
        row_to_batch: row of the page table for each row, ``[num_rows]``; ``None``: the same row.
        deterministic, dsa_graph_safe: accepted; results are always the same, and nothing waits for the device.
        tie_break: a :class:`flashinfer.TopKTieBreak`, for scores equal to the last one.
        row_starts: column of each row's first score, ``[num_rows]``; ``None``: 0. Places are counted from it.
        page_table_row_starts: entry of the page table for each row's first page, ``[num_rows]``; ``None``: ``row_starts``.
        page_size: slots of a page, a power of two up to 2^30.
        out: ``[num_rows, k]`` int32, contiguous, receives the result.
        out_raw_indices: like ``out``, receives the places themselves, in the same order.

    Returns:
        ``out``, or a new ``[num_rows, k]`` int32: slots in ascending order of the places, then -1.

    Raises:
        ValueError: shapes, ``k``, ``tie_break`` or ``page_size`` that do not fit; ``row_starts`` with pages of more than
            one slot and without ``page_table_row_starts``; outputs that overlap each other or an input.
        TypeError: dtypes that do not fit.
    """
    op = "top_k_page_table_transform"
    tensors = (input, src_page_table, lengths, row_to_batch, row_starts, page_table_row_starts, out, out_raw_indices)
    names = (
        "input", "src_page_table", "lengths", "row_to_batch", "row_starts", "page_table_row_starts", "out",
        "out_raw_indices",
    )  # fmt: skip
    check_one_device(op, names, tensors)
    check_rows(op, "input", input)
    check_rows(op, "src_page_table", src_page_table)
    if src_page_table.dtype != torch.int32:
        raise TypeError(f"{op}: src_page_table: got {src_page_table.dtype}, wanted torch.int32")
    if not 1 <= page_size <= _LARGEST_PAGE or page_size & (page_size - 1):
        raise ValueError(f"{op}: page_size: got {page_size}, wanted a power of two from 1 to {_LARGEST_PAGE}")
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        raise ValueError(f"{op}: page_table_row_starts: got None, wanted entries beside row_starts and page_size > 1")
    rows = input.shape[0]
    if row_to_batch is None:
        _check_size(op, "src_page_table", src_page_table.shape[0], rows)
    else:
        _check_list(op, "row_to_batch", row_to_batch, input)
    if page_table_row_starts is not None:
        _check_list(op, "page_table_row_starts", page_table_row_starts, input)
    if k < 1:
        raise ValueError(f"{op}: k: got {k}, wanted 1 or more")
    _check_outputs(op, (rows, k), tensors[:6], out=out, out_raw_indices=out_raw_indices)
    places, inside = _places(op, input, lengths, k, row_starts, tie_break)
    batch = torch.arange(rows, device=input.device) if row_to_batch is None else row_to_batch.long()
    entries = places // page_size
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    if first is not None:
        entries = entries + first[:, None]
    pages = src_page_table[batch[:, None], entries.clamp(max=src_page_table.shape[1] - 1)]
    slots = torch.where(inside, pages * page_size + places % page_size, -1).int()
    if out_raw_indices is not None:
        out_raw_indices.copy_(torch.where(inside, places, -1))
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
    """Return the places of the ``k`` largest scores of each row, plus the row's offset (sparse attention).

    Args:
        input: scores ``[num_rows, max_len]``; NaN counts as the smallest.
        offsets: numbers that are added to each row's places, ``[num_rows]`` int32 or int64.
        lengths: number of scores of each row, ``[num_rows]`` int32 or int64.
        k: number of places.
        row_starts: column of each row's first score, ``[num_rows]``; ``None``: 0. Places are counted from it.
        deterministic, tie_break, dsa_graph_safe: as for :func:`top_k_page_table_transform`.

    Returns:
        ``[num_rows, k]`` int32 in ascending order, then -1.

    Raises:
        ValueError: shapes, ``k`` or ``tie_break`` that do not fit.
        TypeError: dtypes that do not fit.
    """
    names = ("input", "offsets", "lengths", "row_starts")
    check_one_device("top_k_ragged_transform", names, (input, offsets, lengths, row_starts))
    check_rows("top_k_ragged_transform", "input", input)
    _check_list("top_k_ragged_transform", "offsets", offsets, input)
    places, inside = _places("top_k_ragged_transform", input, lengths, k, row_starts, tie_break)
    return torch.where(inside, places + offsets[:, None], -1).int()


def _check_list(op: str, name: str, given: torch.Tensor, rows: torch.Tensor) -> None:
    check_tensor(op, name, given)
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
    """Refuse outputs of another form, and those that overlap an input or each other."""
    given = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{op}: {name}: got {tensor.dtype}, wanted torch.int32")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{op}: {name}: got shape {list(tensor.shape)}, wanted {list(shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name}: got strides {tensor.stride()}, wanted a contiguous tensor")
    if not given or is_dynamo_compiling():
        return
    others = [tensor for tensor in inputs if tensor is not None]
    for name, tensor in given.items():
        if any(_overlap(tensor, other) for other in others):
            raise ValueError(f"{op}: {name}: overlaps another tensor, wanted memory of its own")
        others.append(tensor)


def _places(
    op: str, input: torch.Tensor, lengths: torch.Tensor, k: int, row_starts: torch.Tensor | None, tie_break: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[num_rows, k]`` places in ascending order, and a mask of those that the rows have."""
    _check_list(op, "lengths", lengths, input)
    last = takes_last(op, tie_break)
    width = input.shape[1]
    if k < 1:
        raise ValueError(f"{op}: k: got {k}, wanted 1 or more")
    columns = torch.arange(width, device=input.device)
    if row_starts is not None:
        _check_list(op, "row_starts", row_starts, input)
        lengths = torch.minimum(lengths, width - row_starts)
    # Ties go to the first columns, so rows are read from their ends where they shall go to the last.
    source = (lengths[:, None] - 1 - columns).clamp(min=0) if last else columns
    if last or row_starts is not None:
        if row_starts is not None:
            source = source + row_starts[:, None]
        input = input.gather(1, source.clamp(max=width - 1).expand(input.shape))
    # A column outside the row loses against every score, because it lies after all of them.
    scores = torch.where((columns < lengths[:, None]) & ~input.isnan(), input, -float("inf"))
    places = top_k(scores, min(k, width))[1]
    inside = places < lengths[:, None]
    if last:
        places = torch.where(inside, lengths[:, None] - 1 - places, width).sort(-1)[0]
        places = torch.where(inside, places, 0)
    if k > width:
        places = torch.nn.functional.pad(places, (0, k - width))
        inside = torch.nn.functional.pad(inside, (0, k - width))
    return places, inside
