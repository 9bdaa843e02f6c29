"""Tables of a plan: conversion to the kernels' form, checks on the host, and copies to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.indices import check_each, check_offsets
from .._ops.numbers import check_range
from .._ops.tensors import check_count
from ..jit.frozen import refuse_capture

INT32_MAX = 2**31 - 1


def refuse_graph() -> None:
    """Raise an error under ``torch.compile``. Without ``fullgraph=True``, torch then runs the caller in Python.

    Raises:
        ValueError: the call is traced. The text gives the remedy.
    """
    if is_dynamo_compiling():
        raise ValueError(
            "plan(): got a call under torch.compile, wanted it outside of the compiled function; run() belongs inside"
        )


def on_host(*tensors: torch.Tensor | None) -> Sequence[Any]:
    """Return the tensors on the CPU. One copy reads all tensors of a device, so the host waits once.

    Raises:
        CaptureError: a CUDA graph is being captured. Its replays would not repeat the copies of a plan.
    """
    refuse_graph()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        refuse_capture("plan(): the host would read and write tables", "call it")
    for x in tensors:
        if x is not None and not x.is_cpu:
            break
    else:
        return tensors
    on_device = [x for x in tensors if x is not None and not x.is_cpu]
    copies = iter(torch.cat([x.view(torch.int32) for x in on_device]).cpu().split([x.numel() for x in on_device]))
    return [x if x is None or x.is_cpu else next(copies).view(x.dtype) for x in tensors]


def check_indices(op: str, name: str, indices: torch.Tensor, indptr_name: str, first: int, end: int) -> int:
    """Check the entries ``[first, end)`` of a page table. Other entries may have any value.

    Returns:
        One more than the largest page. 0 if the table is on a device or the range is empty.
    """
    check_range(op, name, indices.numel(), end, unit="pages", why=f", the end of {indptr_name}")
    if indices.device.type != "cpu" or first == end:
        return 0
    smallest, largest = (int(x) for x in indices[first:end].aminmax())
    check_range(op, name, smallest, 0)
    return largest + 1


def check_batch_size(op: str, name: str, batch_size: int, buffer: torch.Tensor | None) -> None:
    if buffer is not None:
        fixed = buffer.numel() - 1
        if batch_size != fixed:
            check_range(op, name, batch_size, fixed, fixed, "requests", " as the buffer for CUDA graphs has")


def paged_kv_lens(
    op: str, name: str, indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return the number of keys of each request, ``[batch_size]`` int32 on the host. Without pages it is 0."""
    pages = indptr.diff()
    has_pages = pages > 0
    if last_page_len.numel():
        check_each(op, name, torch.where(has_pages, last_page_len, 1), 1, page_size, ", the page_size")
        check_range(op, name, int(pages.max()) * page_size, most=INT32_MAX, unit="keys of a request")
    return (pages - 1).mul_(page_size).add_(last_page_len).mul_(has_pages)


class Tables:
    """Tables of a plan on the device: new copies, or the caller's buffers. ``commit()`` writes the buffers."""

    def __init__(self, op: str, device: torch.device, non_blocking: bool) -> None:
        self.op, self.device, self.non_blocking = op, device, non_blocking
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_device(
        self, name: str, buffer: torch.Tensor | None, x: torch.Tensor, used: int | None = None
    ) -> torch.Tensor:
        """Return the device memory for the first ``used`` elements of ``x``, by default for all of them."""
        if x is buffer:
            return x
        count, source = x.numel(), x
        if used is not None and used < count:
            count, source = used, x[:used]
        if buffer is None:
            return source.to(self.device, non_blocking=self.non_blocking, copy=True)
        most = buffer.numel()
        if count > most:
            check_range(self.op, name, count, most=most, unit="elements", why=", the size of its buffer")
        if x.data_ptr() != buffer.data_ptr() or x.device != buffer.device:  # engines write into the buffer themselves
            self.pending.append((buffer if count == most else buffer[:count], source))
        return buffer

    def commit(self) -> None:
        for buffer, x in self.pending:
            buffer.copy_(x, non_blocking=self.non_blocking)


class Batch(NamedTuple):
    """The requests of a plan: lengths on the host, tables on the device."""

    num_queries: int  # the end of the last request's queries in q
    qo_indptr: torch.Tensor | None  # on the host; None: one query for each request
    kv_lens: torch.Tensor  # on the host
    kv_size: int  # ragged keys, or one more than the largest page; 0: unknown
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    kv_start: int = 0  # the first ragged key of a request
    first_query: int = 0  # qo_indptr[0], as a number, because graphs cannot read qo_indptr


def check_pages(
    op: str, qo_indptr: torch.Tensor | None, page_size: int, indptr: torch.Tensor, last: torch.Tensor,
    indices: torch.Tensor, names: tuple[str, str, str],
) -> tuple[torch.Tensor, int, int]:  # fmt: skip
    """Check the tables of a paged batch. Only ``indices`` may be on a device.

    Returns:
        Lengths of keys, one more than the largest page, and the number of indices in use.
    """
    indptr_name, indices_name, last_name = names
    first, used = check_offsets(op, indptr_name, indptr)
    batch_size = indptr.numel() - 1
    if qo_indptr is not None:
        check_count(op, "qo_indptr", qo_indptr, batch_size + 1, f" as {indptr_name} has")
    check_count(op, last_name, last, batch_size)
    num_pages = check_indices(op, indices_name, indices, indptr_name, first, used)
    return paged_kv_lens(op, last_name, indptr, last, page_size), num_pages, used


def paged_batch(
    tables: Tables, qo_indptr: torch.Tensor, page_size: int, indptr: torch.Tensor, host_indptr: torch.Tensor,
    indices: torch.Tensor, last: torch.Tensor,
) -> Batch:  # fmt: skip
    """Return a paged batch with its lengths of keys. ``qo_indptr``, ``host_indptr`` and ``last`` are on the host."""
    names = ("indptr", "indices", "last_page_len")
    kv_lens, num_pages, used = check_pages(tables.op, qo_indptr, page_size, host_indptr, last, indices, names)
    device_tables = tables.to_device("indptr", None, indptr), tables.to_device("indices", None, indices[:used])
    return Batch(int(qo_indptr[-1]), qo_indptr, kv_lens, num_pages, *device_tables, first_query=int(qo_indptr[0]))
