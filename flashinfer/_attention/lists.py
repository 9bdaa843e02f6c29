"""Work lists of a plan: work items, merges, and their buffers.

One native call checks the tables of a batch, computes lengths of keys and schedules the work. It writes the lists to
new host memory. For CUDA this memory is pinned, so the copy to ``int_workspace_buffer`` is asynchronous. It is new for
each plan, because an earlier copy may still read the old one. Tables follow the lists, so one copy transfers both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._ops.dtypes import NUMBERS, dtype_of
from .._ops.errors import called, raise_from_module
from .._ops.numbers import check_multiple, check_range, positive
from .._ops.tensors import check_device, check_tensor
from .scales import output_dtype
from .signature import HostTables, PlanNumbers
from .tables import Tables

INT_WORKSPACE = 8 << 20  # bytes
_CAPTURED = " as in the wrapper's first plan, which fixes the sizes of a captured CUDA graph"
MAX_CACHED_NUMBERS = 256  # a wrapper has few kinds of plans
_HEADER = 16
_Header = ctypes.c_int32 * _HEADER
_ITEMS, _MERGES, _TILE_ROWS, _SLOT_ROWS, _SLOTS, _MAX_ITEMS, _MAX_MERGES, _MAX_SLOTS, _NEEDED = range(9)
_VALID, _NUM_QUERIES, _FIRST_QUERY, _KV_SIZE, _KV_START, _KV_END = range(9, 15)


class Shape(NamedTuple):
    """Heads, head sizes and dtypes of a batch. They do not depend on its lengths."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype

    @classmethod
    def of(
        cls,
        op: str,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        q_data_type: str | torch.dtype,
        kv_data_type: str | torch.dtype | None,
        o_data_type: str | torch.dtype | None = None,
    ) -> Shape:
        """Return the shape of a plan.

        Keys and the output have the queries' dtype by default. The output of 8-bit queries is float16 by default.
        """
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        sizes = {
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim_qk": head_dim_qk,
            "head_dim_vo": head_dim_vo,
        }  # fmt: skip
        for name, size in sizes.items():
            positive(op, name, size)
        check_multiple(op, "num_qo_heads", num_qo_heads, "num_kv_heads", num_kv_heads)
        q = dtype_of(op, "q_data_type", q_data_type)
        kv, o = q, output_dtype(q)
        if kv_data_type is not None:
            kv = dtype_of(op, "kv_data_type", kv_data_type)
        if o_data_type is not None:
            o = dtype_of(op, "o_data_type", o_data_type)
        return cls(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q, kv, o)

    def plan_numbers(self, *rest: int) -> PlanNumbers:
        """Return the numbers of plans of this shape. ``rest`` begins with ``mask_mode``."""
        return PlanNumbers(
            self.num_qo_heads, self.num_kv_heads, self.head_dim_qk, self.head_dim_vo, NUMBERS.get(self.dtype_q, 0),
            NUMBERS.get(self.dtype_kv, 0), NUMBERS.get(self.dtype_o, 0), *rest,
        )  # fmt: skip


class WorkLists(NamedTuple):
    """Work items and merges of a plan on the device, as fields of :class:`CallArguments`."""

    plan: torch.Tensor
    float_workspace: torch.Tensor
    batch_size: int
    max_items: int
    max_merges: int
    max_slots: int
    tile_rows: int
    slot_rows: int


class HostPlan(NamedTuple):
    """Work lists of a plan on the host, and the sizes computed from its tables."""

    host: torch.Tensor
    header: list[int]
    numbers: PlanNumbers
    batch_size: int
    graph_sizes: GraphSizes | None
    tables_at: int  # offset of kv_indptr and kv_indices after the lists, 0 without them
    end: int  # elements in use
    ranges: list[int]  # end and start of queries, number of pages or rows of keys, first and last offset of keys

    @property
    def kv_lens(self) -> torch.Tensor:
        """Return the lengths of keys, on the host."""
        return self.host[_HEADER + self.batch_size : _HEADER + 2 * self.batch_size]


_FIXED_BY_GRAPH = ("max_items", "max_merges", "tile_rows")  # numbers of a plan that a captured graph fixes


class GraphSizes(NamedTuple):
    """Sizes of the launches in a captured graph, which later plans must not exceed."""

    fixed: tuple[int, ...]
    num_queries: int
    max_items: int
    max_merges: int
    max_slots: int
    tile_rows: int


class Scheduler:
    """Workspaces of a wrapper. It makes plans and writes them to the workspaces."""

    def __init__(self, op: str, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool) -> None:
        self.op, self.use_cuda_graph = op, use_cuda_graph
        self.split = True  # False: no request's keys are split
        self._expected_size = 1 << 12
        self._tile_support: dict[tuple[Any, ...], bool] = {}
        self._numbers: dict[tuple[PlanNumbers, bool, GraphSizes | None], torch.Tensor] = {}
        self.reset(float_workspace_buffer, None)

    def reset(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None) -> None:
        """Replace the workspaces. Existing plans become invalid."""
        self.float_workspace = _bytes(self.op, "float_workspace_buffer", float_workspace_buffer)
        self.device = self.float_workspace.device
        if int_workspace_buffer is None:
            int_workspace_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        ints = _bytes(self.op, "int_workspace_buffer", int_workspace_buffer)
        check_device(self.op, "int_workspace_buffer", ints, self.device, " as float_workspace_buffer is")
        self.int_workspace = ints[: ints.numel() // 4 * 4].view(torch.int32)
        self._int_capacity, self._float_bytes = self.int_workspace.numel(), self.float_workspace.numel()
        self._lists = self.int_workspace  # the view of the last plan's lists
        self.graph_sizes: GraphSizes | None = None
        self.header: list[int] = []  # of the last plan
        self.device_index = self.device.index or 0
        self._pin = self.device.type == "cuda"

    def make(
        self, plan: Callable[..., None], numbers: PlanNumbers, tables: HostTables, fixed: tuple[int, ...] | None = None
    ) -> HostPlan | None:
        """Schedule a batch in host memory. Runs of the last plan are not affected.

        ``kv_indptr`` and the used ``kv_indices`` follow the lists if the workspace has room and no captured graph
        reads them from buffers of the caller.

        Args:
            plan: the operator: (buffer, numbers, tables ...).
            numbers: numbers of the batch, without the sizes of captured graphs.
            tables: tables on the host.
            fixed: numbers that are equal in all plans of one captured graph, by default the first seven.

        Returns:
            The plan, or ``None`` if a table is invalid. The caller then raises a detailed error.

        Raises:
            ValueError: a plan that does not fit a captured graph.
        """
        if not self.split:
            numbers = numbers._replace(split=0)
        graph_sizes = None
        if self.use_cuda_graph:
            graph_sizes = self._graph_sizes_for(plan, numbers, tables, numbers.fixed if fixed is None else fixed)
            if graph_sizes is None:
                return None
        offsets, size = tables.kv_indptr, self._expected_size
        with_tables = offsets is not None and not self.use_cuda_graph
        while True:
            host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=self._pin)
            header = self._call(plan, host, numbers, tables, with_tables, graph_sizes)
            if not header[_VALID]:
                return None
            end, tables_at = header[_NEEDED], 0
            if offsets is not None and with_tables:
                at = _aligned(end)
                filled = _aligned(at + offsets.numel()) + (0 if tables.kv_indices is None else header[_KV_END])
                if filled <= self._int_capacity:
                    end, tables_at = filled, at
            if end <= size:
                break
            size = end
        self._expected_size = max(end * 5 // 4, 1 << 12)
        lens = tables.kv_lens if offsets is None else offsets
        assert lens is not None
        batch_size, ranges = lens.numel() - (offsets is not None), header[_NUM_QUERIES : _KV_END + 1]
        return HostPlan(host, header, numbers, batch_size, graph_sizes, tables_at, end, ranges)

    def key_tables(
        self,
        host_plan: HostPlan,
        tables: Tables,
        names: tuple[str, str],
        sources: tuple[torch.Tensor, torch.Tensor | None],
        buffers: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the device memory of ``kv_indptr`` and of the used ``kv_indices``.

        :meth:`write` copies tables that follow the lists. ``tables`` copies all others, and writes the buffers of
        captured graphs later. ``names``, ``sources`` and ``buffers`` are those of the two tables.
        """
        indptr, indices = sources
        if host_plan.tables_at:
            end = host_plan.tables_at + host_plan.batch_size + 1
            indptr = self.int_workspace[host_plan.tables_at : end]
            if indices is not None and indices.is_cpu:
                return indptr, self.int_workspace[_aligned(end) : host_plan.end]
        else:
            indptr = tables.to_device(names[0], buffers[0], indptr)
        return indptr, None if indices is None else tables.to_device(
            names[1], buffers[1], indices, host_plan.ranges[-1]
        )

    def write(self, host_plan: HostPlan) -> WorkLists:
        """Copy a plan to the device. It overwrites the last one.

        Raises:
            ValueError: a workspace is too small, or the plan has more partial states than a captured graph.
        """
        header, graph_sizes = host_plan.header, host_plan.graph_sizes
        needed = header[_NEEDED]
        if graph_sizes is None:
            sizes = (header[_ITEMS], header[_MERGES], header[_SLOTS], header[_TILE_ROWS], header[_SLOT_ROWS])
        else:
            sizes = (*graph_sizes[2:], graph_sizes.tile_rows)
        self._check_capacity(host_plan, sizes)
        lists, end = self._lists, host_plan.end
        if lists.numel() != needed:
            lists = self._lists = self.int_workspace[:needed]
        (lists if end == needed else self.int_workspace[:end]).copy_(host_plan.host[:end], non_blocking=True)
        self.graph_sizes, self.header = graph_sizes, header
        return WorkLists(lists, self.float_workspace, host_plan.batch_size, *sizes)

    def kv_lens_of(self, lists: WorkLists) -> torch.Tensor:
        """Return the view of the lengths of keys in a plan's lists, ``[batch_size]``."""
        return lists.plan[_HEADER + lists.batch_size : _HEADER + 2 * lists.batch_size]

    def supports_tile(self, plan: Callable[..., None], numbers: PlanNumbers, tile_rows: int) -> bool:
        """Return whether a variant has kernels with tiles of ``tile_rows``. ``plan`` is the variant's operator."""
        key = (*numbers.fixed, numbers.variant, tile_rows)
        if key not in self._tile_support:
            nothing = HostTables(kv_lens=torch.empty(0, dtype=torch.int32, device="cpu"))
            empty = numbers._replace(tile_rows=tile_rows, device=self.device_index)
            try:
                header = self._call(plan, torch.empty(_HEADER, dtype=torch.int32, device="cpu"), empty, nothing)
                self._tile_support[key] = header[_TILE_ROWS] == tile_rows
            except RuntimeError as err:
                if "no tile of" not in str(err):
                    raise
                self._tile_support[key] = False
        return self._tile_support[key]

    def _call(
        self,
        plan: Callable[..., None],
        buffer: torch.Tensor,
        numbers: PlanNumbers,
        tables: HostTables,
        with_tables: bool = False,
        graph_sizes: GraphSizes | None = None,
    ) -> list[int]:
        packed = self._numbers.get((numbers, with_tables, graph_sizes))
        if packed is None:
            if len(self._numbers) >= MAX_CACHED_NUMBERS:
                self._numbers.clear()
            sizes = {} if graph_sizes is None else {name: getattr(graph_sizes, name) for name in _FIXED_BY_GRAPH}
            packed = numbers._replace(with_tables=int(with_tables), **sizes).tensor()
            self._numbers[numbers, with_tables, graph_sizes] = packed
        try:
            plan(buffer, packed, *tables)
        except RuntimeError as err:
            arguments = (buffer, packed, *tables)
            raise_from_module(self.op, [""] * len(arguments), arguments, err)
        return _Header.from_address(buffer.data_ptr())[:]  # 1 us less than torch's tolist()

    def _graph_sizes_for(
        self, plan: Callable[..., None], numbers: PlanNumbers, tables: HostTables, fixed: tuple[int, ...]
    ) -> GraphSizes | None:
        """Return the sizes of the captured graph. The first plan sets them to its own sizes."""
        graph_sizes = self.graph_sizes
        if graph_sizes is not None and graph_sizes.fixed == fixed:
            queries = tables.qo_indptr
            if queries is not None and queries.numel():
                count = int(queries[-1])
                check_range(self.op, "qo_indptr", count, most=graph_sizes.num_queries, unit="queries", why=_CAPTURED)
            return graph_sizes
        header = self._call(plan, torch.empty(_HEADER, dtype=torch.int32, device="cpu"), numbers, tables)
        if not header[_VALID]:
            return None
        sizes = (header[_MAX_ITEMS], header[_MAX_MERGES], header[_MAX_SLOTS], header[_TILE_ROWS])
        return GraphSizes(fixed, header[_NUM_QUERIES], *sizes)

    def _check_capacity(self, host_plan: HostPlan, sizes: tuple[int, ...]) -> None:
        _, _, max_slots, _, slot_rows = sizes
        name, slots, numbers = "float_workspace_buffer", host_plan.header[_SLOTS], host_plan.numbers
        if slots > max_slots:
            check_range(self.op, name, slots, most=max_slots, unit="partial results", why=_CAPTURED)
        # The output's columns, m and l of each partial result are float32.
        room = 4 * max_slots * numbers.num_kv_heads * slot_rows * (numbers.head_dim_vo + 2)
        for name, got, wanted in (
            ("int_workspace_buffer", 4 * self._int_capacity, 4 * host_plan.header[_NEEDED]),
            ("float_workspace_buffer", self._float_bytes, room),
        ):
            if got < wanted:
                why = ": pass a larger one to reset_workspace_buffer()"
                check_range(self.op, name, got, wanted, unit="bytes", why=why)


def _aligned(used: int) -> int:
    """Return the offset of a table after ``used`` elements: the next multiple of 16 bytes."""
    return (used + 3) // 4 * 4


def _bytes(op: str, name: str, buffer: torch.Tensor) -> torch.Tensor:
    check_tensor(op, name, buffer)
    if not buffer.is_contiguous() or buffer.data_ptr() % 32 != 0:
        raise ValueError(f"{called(op)}: {name}: wanted a contiguous tensor that starts at a multiple of 32 bytes")
    return buffer.view(-1).view(torch.uint8)
