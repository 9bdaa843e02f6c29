"""Plans of batches: lengths on the host, the lists that the operator ``plan`` makes of them, buffers that hold those.

A plan is made by every ``plan()`` of a wrapper. It is written into memory of its own on the host (pinned where the
wrapper is for CUDA, so that the copy waits for nobody, and fresh, so that none that is still on its way is
overwritten) and copied from there into the wrapper's ``int_workspace_buffer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..jit.capture import refuse_capture
from .arguments import Operators, call

INT_WORKSPACE = 8 << 20  # bytes
INT32_MAX = 2**31 - 1
_HEADER = 16
_ITEMS, _MERGES, _TILE_ROWS, _SLOT_ROWS, _SLOTS, _MAX_ITEMS, _MAX_MERGES, _MAX_SLOTS, _NEEDED = range(9)
# DType of include/flashinfer/common/dtype.h
DTYPES = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 8,
    torch.float8_e5m2: 9,
}


@dataclass(frozen=True)
class Shape:
    """What of a batch does not change with its lengths."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype

    def check(self, op: str) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
            if getattr(self, name) < 1:
                raise ValueError(f"{op}: {name}: got {getattr(self, name)}, wanted a positive number")
        if self.num_qo_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"{op}: num_qo_heads: got {self.num_qo_heads}, wanted a multiple of num_kv_heads, {self.num_kv_heads}"
            )


def refuse_graph() -> None:
    """In one graph (``fullgraph=True``) an error that says what to do; else torch leaves what follows to Python."""
    if is_dynamo_compiling():
        raise ValueError(
            "plan(): got a call under torch.compile, wanted it outside of what is compiled, where run() is"
        )


def on_host(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors' values on the CPU: those of a device come in one copy, the only time that the host waits.

    Raises:
        CaptureError: a CUDA graph is being captured: what a plan copies would be gone when the graph is replayed.
    """
    refuse_graph()
    refuse_capture("plan(): the host would read and write tables", "call it")
    far = [x for x in tensors if x is not None and x.device.type != "cpu"]
    if not far:
        return list(tensors)
    near = iter(torch.cat([x.view(torch.int32) for x in far]).cpu().split([x.numel() for x in far]))
    return [x if x is None or x.device.type == "cpu" else next(near).view(x.dtype) for x in tensors]


def check_table(op: str, name: str, x: object, dtype: torch.dtype = torch.int32) -> None:
    """A table is a contiguous vector of int32."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name}: got {x.dtype}, wanted {dtype}")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{op}: {name}: got shape {list(x.shape)}, wanted a contiguous vector")


def check_tables(op: str, **tables: torch.Tensor) -> None:
    for name, table in tables.items():
        check_table(op, name, table)


def check_indptr(op: str, name: str, indptr: torch.Tensor, batch_size: int | None = None) -> None:
    """``indptr`` is on the host. It starts at 0 and never falls."""
    values = indptr.tolist()
    if batch_size is not None and len(values) != batch_size + 1:
        raise ValueError(f"{op}: {name}: got {len(values)} elements, wanted {batch_size + 1}, one more than requests")
    if not values or values[0] != 0:
        raise ValueError(f"{op}: {name}: got {values[0] if values else 'no element'} first, wanted 0")
    if values != sorted(values):
        at = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
        raise ValueError(
            f"{op}: {name}: got {values[at]} at {at} after {values[at - 1]}, wanted numbers that never fall"
        )


def paged_kv_lens(
    op: str, name: str, indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Lengths of requests, ``[batch_size]`` int32 on the host; 0 where a request has no page."""
    pages = indptr.diff()
    has_pages = pages > 0
    if last_page_len.numel():
        counted = torch.where(has_pages, last_page_len, 1)
        low, high = (int(x) for x in counted.aminmax())
        if low < 1 or high > page_size:
            at = int(((counted < 1) | (counted > page_size)).nonzero()[0])
            raise ValueError(
                f"{op}: {name}: got {int(last_page_len[at])} for request {at}, wanted 1 to the page_size of {page_size}"
            )
        if int(pages.max()) * page_size > INT32_MAX:
            raise ValueError(f"{op}: {name}: got a request of {int(pages.max())} pages, more than 2147483647 keys")
    return (pages - 1).mul_(page_size).add_(last_page_len).mul_(has_pages)


@dataclass(frozen=True)
class Bounds:
    """Sizes that a captured graph has in its launches: what later plans must fit into."""

    shape: Shape
    rows: int
    max_items: int
    max_merges: int
    max_slots: int
    tile_rows: int


class Scheduler:
    """The workspaces of a wrapper, and plans made into them."""

    def __init__(self, op: str, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool) -> None:
        self.op, self.use_cuda_graph = op, use_cuda_graph
        self.split = True  # whether keys may be cut
        self._guess = 1 << 12
        self.reset(float_workspace_buffer, None)

    def reset(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None) -> None:
        """Take other buffers; plans made before are none of theirs."""
        self.float_workspace = _bytes(self.op, "float_workspace_buffer", float_workspace_buffer)
        self.device = self.float_workspace.device
        if int_workspace_buffer is None:
            int_workspace_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        ints = _bytes(self.op, "int_workspace_buffer", int_workspace_buffer)
        if ints.device != self.device:
            raise ValueError(
                f"{self.op}: int_workspace_buffer: got one on {ints.device}, wanted {self.device} as float_workspace_buffer is"
            )
        self.int_workspace = ints[: ints.numel() // 4 * 4].view(torch.int32)
        self.bounds: Bounds | None = None
        self.header: list[int] = []  # of the last plan

    def make(
        self,
        operators: Operators,
        shape: Shape,
        qo_indptr: torch.Tensor | None,
        kv_lens: torch.Tensor,
        mask_mode: int,
        window_left: int,
    ) -> tuple[Any, ...]:
        """Plan. Returns the operator's arguments ``plan`` ... ``slot_rows``; what was planned before is overwritten.

        Args:
            qo_indptr: ``[batch_size + 1]`` int32 on the host, or ``None``: one query for each request.
            kv_lens: ``[batch_size]`` int32 on the host.

        Raises:
            ValueError: a buffer that is too small, or a plan that does not fit what a graph was captured with.
        """
        batch_size = kv_lens.numel()
        rows = (batch_size if qo_indptr is None else int(qo_indptr[-1])) * (shape.num_qo_heads // shape.num_kv_heads)

        refuse_graph()

        def plan(buffer: torch.Tensor, bounds: Bounds | None) -> list[int]:
            refuse_graph()
            limits = (0, 0, 0) if bounds is None else (bounds.max_items, bounds.max_merges, bounds.tile_rows)
            call(
                self.op, operators.plan, buffer, qo_indptr, kv_lens, shape.num_qo_heads, shape.num_kv_heads,
                shape.head_dim_qk, shape.head_dim_vo, DTYPES[shape.dtype_q], DTYPES[shape.dtype_kv],
                DTYPES[shape.dtype_o], mask_mode, window_left, self.device.index or 0, *limits, self.split,
                operators.variant,
            )  # fmt: skip
            return buffer[:_HEADER].tolist()

        bounds = self._bounds_for(shape, rows, plan) if self.use_cuda_graph else None
        host = self._host_buffer(self._guess)
        header = plan(host, bounds)
        if header[_NEEDED] > host.numel():
            host = self._host_buffer(header[_NEEDED])
            header = plan(host, bounds)
        needed, self._guess = header[_NEEDED], max(header[_NEEDED] * 5 // 4, 1 << 12)
        if bounds is None:
            sizes = (header[_ITEMS], header[_MERGES], header[_SLOTS], header[_TILE_ROWS], header[_SLOT_ROWS])
        else:
            sizes = (bounds.max_items, bounds.max_merges, bounds.max_slots, bounds.tile_rows, bounds.tile_rows)
        self._check_room(shape, header, needed, sizes)
        lists = self.int_workspace[:needed]
        lists.copy_(host[:needed], non_blocking=True)
        self.bounds, self.header = bounds, header
        return (lists, self.float_workspace, batch_size, *sizes)

    def _host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def _bounds_for(self, shape: Shape, rows: int, plan: Any) -> Bounds:
        """What the first plan fixed, or what this one does, being the first."""
        bounds = self.bounds
        if bounds is not None and bounds.shape == shape:
            if rows > bounds.rows:
                group = shape.num_qo_heads // shape.num_kv_heads
                raise ValueError(
                    f"{self.op}: qo_indptr: got {rows // group} queries, and the first plan of this wrapper, which fixed"
                    f" what a CUDA graph is captured with, had {bounds.rows // group}"
                )
            return bounds
        header = plan(torch.empty(_HEADER, dtype=torch.int32), None)
        return Bounds(shape, rows, header[_MAX_ITEMS], header[_MAX_MERGES], header[_MAX_SLOTS], header[_TILE_ROWS])

    def _check_room(self, shape: Shape, header: Sequence[int], needed: int, sizes: tuple[int, ...]) -> None:
        if header[_SLOTS] > sizes[2]:
            raise ValueError(
                f"{self.op}: float_workspace_buffer: got {header[_SLOTS]} partial results, and the first plan of this"
                f" wrapper, which fixed what a CUDA graph is captured with, left room for {sizes[2]}"
            )
        if needed > self.int_workspace.numel():
            raise ValueError(
                f"{self.op}: int_workspace_buffer: got {4 * self.int_workspace.numel()} bytes, wanted {4 * needed}:"
                " give a larger one to reset_workspace_buffer()"
            )
        room = sizes[2] * shape.num_kv_heads * sizes[4] * (shape.head_dim_vo + 1) * 4
        if room > self.float_workspace.numel():
            raise ValueError(
                f"{self.op}: float_workspace_buffer: got {self.float_workspace.numel()} bytes, wanted {room}:"
                " give a larger one to reset_workspace_buffer()"
            )


def _bytes(op: str, name: str, buffer: object) -> torch.Tensor:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(buffer).__name__}, wanted Tensor")
    if not buffer.is_contiguous() or buffer.data_ptr() % 32 != 0:
        raise ValueError(f"{op}: {name}: wanted a contiguous tensor that starts at a multiple of 32 bytes")
    return buffer.view(-1).view(torch.uint8)
