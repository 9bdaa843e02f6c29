"""Plans: work items of a batch, options of its runs, and checks of the arguments of a run."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .._ops.arguments import check_as_planned
from .._ops.numbers import check_range
from .._ops.sizes import exceeds
from .._ops.tensors import check_device, check_dims, check_metadata
from .arguments import CAUSAL, MULTI_ITEM, Logits, parameters_of
from .bound import Bound, bind_plan
from .kernels import NUMBERS_OF_KERNELS
from .lists import Shape, WorkLists
from .masks import NO_MASKS, MaskTensors
from .operators import Operators
from .signature import CallArguments, Parameters
from .tables import Batch


class NoCopies:
    """Base of all wrappers. Copies and pickles are refused, because they would share the plan and the workspaces."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``copy.copy``, ``copy.deepcopy`` and ``pickle``."""
        name = type(self).__name__
        raise TypeError(f"{name}: got a copy of a wrapper, wanted a new wrapper: both would share one plan")


class SplitRule(NamedTuple):
    """Rule of a plan for splitting keys."""

    split: bool = True
    kv_chunk: int = 0  # splits end at multiples of this many keys; 0: the scheduler balances the work

    @property
    def is_fixed(self) -> bool:
        """Return True if a request's result must not depend on the batch.

        All batches then run the same tiles.
        """
        return not self.split or self.kv_chunk > 0


BALANCED = SplitRule()


class Options(NamedTuple):
    """Options that may change between runs of one plan. They are arguments of the kernels."""

    logits: Logits
    causal: int  # CAUSAL or NON_CAUSAL; ignored if there is another mask


class KeyExtent(NamedTuple):
    """The keys that a plan's work items cover: the keys that the causal mask and the window leave.

    A run may mask more of these keys. It never reads other keys.
    """

    causal: bool
    window_left: int  # -1: all

    def contains(self, other: KeyExtent) -> bool:
        """Return whether these ranges include all keys of ``other``."""
        if self.causal and not other.causal:
            return False
        return self.window_left < 0 or 0 <= other.window_left <= self.window_left

    def union(self, other: KeyExtent) -> KeyExtent:
        """Return the smallest extent that contains both."""
        windows = self.window_left, other.window_left
        return KeyExtent(self.causal and other.causal, -1 if min(windows) < 0 else max(windows))


class Workload(NamedTuple):
    """Sizes, tables and masks of the batch that a plan schedules. They are independent of options."""

    batch: Batch
    shape: Shape
    masks: MaskTensors
    page_size: int | None  # None: ragged keys
    kv_layout: int
    # Shape with the caller's dtypes if they are float64. torch's functions then run instead of a kernel, for gradcheck.
    run_shape: Shape | None = None
    split_rule: SplitRule = BALANCED

    def mask_mode(self, options: Options) -> int:
        return options.causal if self.masks.mode is None else self.masks.mode

    def extent(self, options: Options) -> KeyExtent:
        return KeyExtent(self.mask_mode(options) in (CAUSAL, MULTI_ITEM), max(options.logits.window_left, -1))


class Plan(NamedTuple):
    """Plan of a batch: the workload, its work lists, and the options of its runs."""

    workload: Workload
    lists: WorkLists
    extent: KeyExtent  # of the lists
    options: Options
    operators: Operators
    arguments: CallArguments
    parameters: Parameters | tuple[()]  # empty for a custom variant: run() passes them
    # num_queries, kv_size, kernels, sizes of the arguments, window_left + 1
    numbers: tuple[int, ...]
    sizes_as_shape: torch.Tensor  # the numbers for graphs
    bound: Bound | None  # for eager calls
    # Copies of parts of the workload and of the options: fields, because torch 2.10 does not trace properties here.
    shape: Shape  # of the runs
    batch: Batch
    logits: Logits


def make_plan(
    workload: Workload, lists: WorkLists, extent: KeyExtent, options: Options, operators: Operators,
    former: Plan | None, *, device: torch.device, graph_queries: int | None, allows_more_queries: bool,
) -> Plan:  # fmt: skip
    """Return the plan of a workload, from its work lists and the options of its runs.

    Args:
        former: the last plan with these options. Its bound calls are reused if only tables differ. Plans of a captured
            graph usually differ only in the values of tables, because addresses and sizes stay.
        graph_queries: number of queries in the captured graph that serves all plans, or ``None`` without a graph.
        allows_more_queries: a run may have more queries than the plan.
    """
    batch, shape, masks, logits = workload.batch, workload.shape, workload.masks, options.logits
    parts = workload.run_shape or shape, batch, logits
    num_queries, kv_size = (batch.num_queries, batch.kv_size) if graph_queries is None else (graph_queries, 0)
    window = max(logits.window_left, -1) + 1
    kernels = NUMBERS_OF_KERNELS.get(operators.kernels, 0)
    numbers = (num_queries, kv_size, kernels, *lists[2:], masks.token_pos_in_items_len, window)
    same_calls = former is not None and _same_calls(former, workload, operators)
    sizes_as_shape = former.sizes_as_shape if former is not None and former.numbers == numbers else as_shape(numbers)
    if former is not None and same_calls and _same_memory(former, workload, lists) and former.numbers == numbers:
        return Plan(
            workload,
            lists,
            extent,
            options,
            operators,
            former.arguments,
            former.parameters,
            numbers,
            sizes_as_shape,
            former.bound,
            *parts,
        )
    arguments = CallArguments(
        batch.kv_indptr, batch.kv_indices, *lists, masks.packed, masks.indptr, masks.prefix_len, masks.token_pos_in_items,
        masks.token_pos_in_items_len, workload.kv_layout, workload.mask_mode(options), logits.window_left, 1.0,
        logits.rope_scale, logits.rope_theta, operators.variant,
    )  # fmt: skip
    if former is not None and same_calls:
        parameters = former.parameters
    else:
        parameters = () if operators.custom else parameters_of(logits, shape.num_qo_heads, device)
    bound = None
    if isinstance(parameters, Parameters) and workload.run_shape is None and not operators.profiler:
        if former is not None and former.bound is not None and same_calls:
            bound = former.bound
            bound.rebind(arguments, lists, batch.num_queries, batch.kv_size)
        else:
            bound = bind_plan(
                operators,
                shape,
                batch.num_queries,
                allows_more_queries,
                workload.page_size,
                batch.kv_size,
                arguments,
                parameters,
            )
    return Plan(
        workload, lists, extent, options, operators, arguments, parameters, numbers, sizes_as_shape, bound, *parts
    )


def _same_calls(former: Plan, workload: Workload, operators: Operators) -> bool:
    """Return whether the calls of two plans with the same options differ in tables only."""
    before = former.workload
    return (
        former.operators is operators
        and before.shape == workload.shape
        and before.page_size == workload.page_size
        and before.masks is NO_MASKS
        and workload.masks is NO_MASKS
    )


def _same_memory(former: Plan, workload: Workload, lists: WorkLists) -> bool:
    """Return whether a plan occupies the same memory as ``former``.

    If so, the bound calls of ``former`` read the new lists and tables.
    """
    batch, before = workload.batch, former.workload.batch
    return (
        lists.plan is former.lists.plan
        and lists.float_workspace is former.lists.float_workspace
        and batch.kv_indptr is before.kv_indptr
        and batch.kv_indices is before.kv_indices
        and batch.num_queries == before.num_queries
        and batch.kv_size == before.kv_size
        and workload.run_shape is former.workload.run_shape
    )


# Offsets that make all sizes distinct, because torch gives equal sizes the same symbol.
_OFFSETS = tuple((number + 1) << 40 for number in range(16))
_NO_STRIDES = (0,) * (len(_OFFSETS) + 1)
_NOTHING = torch.empty(0, device="cpu")  # independent of the default device


def as_shape(sizes: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor whose shape contains a plan's sizes. A graph treats them as symbolic.

    A graph would turn integers of a module or a global variable into constants.
    """
    shape = (0, *map(operator.add, _OFFSETS, sizes))
    return _NOTHING.as_strided(shape, _NO_STRIDES[: len(shape)])


def from_shape(carrier: torch.Tensor) -> list[int]:
    """Return the sizes that :func:`as_shape` stored."""
    return [size - offset for size, offset in zip(carrier.shape[1:], _OFFSETS, strict=False)]


def check_inputs(
    op: str, planned: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_queries: int, kv_size: int,
    allows_more_queries: bool, q_len_per_req: int = 1,
) -> None:  # fmt: skip
    """Check that a run fits the plan of ``num_queries`` queries and ``kv_size`` pages or ragged keys.

    ``allows_more_queries``: the run may have more queries than the plan.
    """
    shape, layout, page_size = planned.shape, planned.workload.kv_layout, planned.workload.page_size
    device = planned.lists.plan.device
    check_dims(op, "q", q, 3)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_device(op, name, x, device, " as the plan's tables are")
    if not (allows_more_queries and exceeds(q.shape[0], num_queries)):
        unit = "queries" if q_len_per_req == 1 else f"queries of q_len_per_req {q_len_per_req}"
        check_as_planned(op, "q", q.shape[0], num_queries, unit)
    heads, tokens = k.dim() - 2 - layout, k.dim() - 3 + layout
    check_as_planned(op, "q", q.shape[1], shape.num_qo_heads, "heads")
    check_as_planned(op, "k", k.shape[heads], shape.num_kv_heads, "heads")
    for name, x, head_dim in (("q", q, shape.head_dim_qk), ("k", k, shape.head_dim_qk), ("v", v, shape.head_dim_vo)):
        check_as_planned(op, name, x.shape[-1], head_dim, "elements in a head")
    check_as_planned(op, "q", q.dtype, shape.dtype_q)
    check_as_planned(op, "k", k.dtype, shape.dtype_kv)
    if page_size is not None:
        check_as_planned(op, "paged_kv_cache", k.shape[tokens], page_size, "slots in a page")
    got, what = (k.shape[tokens], "rows of keys") if page_size is None else (k.shape[0], "pages")
    check_range(op, "k", got, kv_size, unit=what, why=" for the tables of plan()")


def results_of(
    op: str, shape: Shape, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the caller's tensors for the results of a run after checks, or new tensors."""
    rows = (q.shape[0], shape.num_qo_heads)
    if out is None:
        out = torch.empty((*rows, shape.head_dim_vo), dtype=shape.dtype_o, device=q.device)
    else:
        check_metadata(op, "out", out, (*rows, shape.head_dim_vo), q.device, shape.dtype_o)
    if lse is not None:
        check_metadata(op, "lse", lse, rows, q.device, torch.float32)
    elif return_lse:
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    return out, lse
