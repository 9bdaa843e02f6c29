"""Lists of a plan: what the operator ``plan`` makes of a batch's lengths, and buffers that hold those.

They are written into memory of their own on the host (pinned where the wrapper is for CUDA, so that the copy waits for
nobody, and fresh, so that none that is still on its way is overwritten) and copied from there into the wrapper's
``int_workspace_buffer``.

What a family plans is its problem: here attention's, of signature.py. Another family brings a class with the same
properties, whose fields are the arguments of its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._ops.dtypes import NUMBERS, dtype_of
from .._ops.numbers import positive
from .operators import call
from .scales import output_dtype
from .signature import Problem
from .tables import refuse_graph

INT_WORKSPACE = 8 << 20  # bytes
_HEADER = 16
_ITEMS, _MERGES, _TILE_ROWS, _SLOT_ROWS, _SLOTS, _MAX_ITEMS, _MAX_MERGES, _MAX_SLOTS, _NEEDED = range(9)


@dataclass(frozen=True)
class Shape:
    """The part of a batch that does not change with its lengths."""

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
        if num_qo_heads % num_kv_heads != 0:
            raise ValueError(
                f"{op}: num_qo_heads: got {num_qo_heads}, wanted a multiple of num_kv_heads, {num_kv_heads}"
            )
        q = dtype_of(op, "q_data_type", q_data_type)
        kv, o = q, output_dtype(q)
        if kv_data_type is not None:
            kv = dtype_of(op, "kv_data_type", kv_data_type)
        if o_data_type is not None:
            o = dtype_of(op, "o_data_type", o_data_type)
        return cls(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q, kv, o)

    @property
    def fixed(self) -> tuple[int, ...]:
        """Return the numbers that every problem of this shape shares; see :class:`Bounds`."""
        return self.problem(None, torch.empty(0, dtype=torch.int32, device="cpu")).fixed

    def problem(self, qo_indptr: torch.Tensor | None, kv_lens: torch.Tensor) -> Problem:
        """Return the problem of a batch: ``[batch_size + 1]`` and ``[batch_size]`` int32 on the host."""
        return Problem(
            qo_indptr, kv_lens, self.num_qo_heads, self.num_kv_heads, self.head_dim_qk, self.head_dim_vo,
            NUMBERS[self.dtype_q], NUMBERS[self.dtype_kv], NUMBERS[self.dtype_o],
        )  # fmt: skip


class Lists(NamedTuple):
    """A plan as operators take it: arguments of :class:`Setting`."""

    plan: torch.Tensor
    float_workspace: torch.Tensor
    batch_size: int
    max_items: int
    max_merges: int
    max_slots: int
    tile_rows: int
    slot_rows: int


@dataclass(frozen=True)
class Bounds:
    """Sizes that a captured graph has in its launches: what later plans must fit into."""

    fixed: tuple[int, ...]
    num_queries: int
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
        self._fitting: dict[tuple[Any, ...], bool] = {}
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

    def make(self, plan: Callable[..., None], problem: Problem) -> Lists:
        """Plan. What was planned before is overwritten.

        Raises:
            ValueError: a buffer that is too small, or a plan that does not fit what a graph was captured with.
        """
        refuse_graph()
        problem = problem._replace(device=self.device.index or 0, split=self.split and problem.split)
        bounds = self._bounds_for(plan, problem) if self.use_cuda_graph else None
        if bounds is not None:
            problem = problem._replace(
                max_items=bounds.max_items, max_merges=bounds.max_merges, tile_rows=bounds.tile_rows
            )
        host = self._host_buffer(self._guess)
        header = self._call(plan, host, problem)
        if header[_NEEDED] > host.numel():
            host = self._host_buffer(header[_NEEDED])
            header = self._call(plan, host, problem)
        needed, self._guess = header[_NEEDED], max(header[_NEEDED] * 5 // 4, 1 << 12)
        if bounds is None:
            sizes = (header[_ITEMS], header[_MERGES], header[_SLOTS], header[_TILE_ROWS], header[_SLOT_ROWS])
        else:
            sizes = (bounds.max_items, bounds.max_merges, bounds.max_slots, bounds.tile_rows, bounds.tile_rows)
        self._check_room(problem, header, needed, sizes)
        lists = self.int_workspace[:needed]
        lists.copy_(host[:needed], non_blocking=True)
        self.bounds, self.header = bounds, header
        return Lists(lists, self.float_workspace, problem.batch_size, *sizes)

    def kv_lens_of(self, lists: Lists) -> torch.Tensor:
        """Return the lengths of keys in a plan's lists, ``[batch_size]``."""
        return lists.plan[_HEADER + lists.batch_size : _HEADER + 2 * lists.batch_size]

    def fits(self, plan: Callable[..., None], problem: Problem, tile_rows: int) -> bool:
        """Return whether another variant's kernels take lists of tiles with as many rows; ``plan`` is its operator."""
        key = (*problem.fixed, problem.variant, tile_rows)
        if key not in self._fitting:
            nothing = torch.empty(0, dtype=torch.int32, device="cpu")
            empty = problem._replace(
                qo_indptr=None, kv_lens=nothing, tile_rows=tile_rows, device=self.device.index or 0
            )
            try:
                header = self._call(plan, torch.empty(_HEADER, dtype=torch.int32, device="cpu"), empty)
                self._fitting[key] = header[_TILE_ROWS] == tile_rows
            except RuntimeError as err:
                if "no tile of" not in str(err):
                    raise
                self._fitting[key] = False
        return self._fitting[key]

    def _call(self, plan: Callable[..., None], buffer: torch.Tensor, problem: Problem) -> list[int]:
        refuse_graph()
        call(self.op, plan, buffer, *problem)
        return buffer[:_HEADER].tolist()

    def _host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")

    def _bounds_for(self, plan: Callable[..., None], problem: Problem) -> Bounds:
        """Return the bounds that the first plan fixed, or fix them if this is the first."""
        bounds = self.bounds
        if bounds is not None and bounds.fixed == problem.fixed:
            if problem.num_queries > bounds.num_queries:
                raise ValueError(
                    f"{self.op}: qo_indptr: got {problem.num_queries} queries, and the first plan of this wrapper, which fixed"
                    f" what a CUDA graph is captured with, had {bounds.num_queries}"
                )
            return bounds
        header = self._call(plan, torch.empty(_HEADER, dtype=torch.int32, device="cpu"), problem)
        sizes = (header[_MAX_ITEMS], header[_MAX_MERGES], header[_MAX_SLOTS], header[_TILE_ROWS])
        return Bounds(problem.fixed, problem.num_queries, *sizes)

    def _check_room(self, problem: Problem, header: Sequence[int], needed: int, sizes: tuple[int, ...]) -> None:
        _, _, max_slots, _, slot_rows = sizes
        if header[_SLOTS] > max_slots:
            raise ValueError(
                f"{self.op}: float_workspace_buffer: got {header[_SLOTS]} partial results, and the first plan of this"
                f" wrapper, which fixed what a CUDA graph is captured with, left room for {max_slots}"
            )
        room = problem.bytes_of(max_slots, slot_rows)
        for name, got, wanted in (
            ("int_workspace_buffer", 4 * self.int_workspace.numel(), 4 * needed),
            ("float_workspace_buffer", self.float_workspace.numel(), room),
        ):
            if wanted > got:
                raise ValueError(
                    f"{self.op}: {name}: got {got} bytes, wanted {wanted}: give a larger one to reset_workspace_buffer()"
                )


def _bytes(op: str, name: str, buffer: object) -> torch.Tensor:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(buffer).__name__}, wanted Tensor")
    if not buffer.is_contiguous() or buffer.data_ptr() % 32 != 0:
        raise ValueError(f"{op}: {name}: wanted a contiguous tensor that starts at a multiple of 32 bytes")
    return buffer.view(-1).view(torch.uint8)
