"""Parsed arguments of a public ``plan()``.

Numbers, modes and dtypes are usually equal in all plans of a wrapper. Their checks are cached by value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from .._ops.errors import called
from .._ops.indices import check_offsets
from .._ops.numbers import positive
from .accepted import split_rule_of
from .arguments import CAUSAL, NON_CAUSAL, logits_of
from .lists import HostPlan, Scheduler, Shape
from .masks import NO_MASK_REQUEST, MaskRequest
from .plan import BALANCED, Options, SplitRule
from .signature import HostTables
from .tables import Tables, check_batch_size, check_pages, on_host, refuse_graph

# Types of arguments that are cached by value. The value of a tensor may change.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
T = TypeVar("T")


def cached_by_value(parse: Callable[..., T]) -> Callable[..., T]:
    """Cache the results of ``parse`` by the values of its arguments. Errors are not cached."""
    cached = lru_cache(maxsize=256, typed=True)(parse)

    def call(*arguments: Any) -> T:
        refuse_graph()
        return (cached if _PLAIN.issuperset(map(type, arguments)) else parse)(*arguments)

    return call


class PlanSettings(NamedTuple):
    """Sizes, dtypes and options of a plan, without its tables and masks."""

    shape: Shape
    options: Options
    split_rule: SplitRule
    page_size: int | None  # None: ragged keys


class PlanRequest(NamedTuple):
    """Arguments of a plan. Tables are contiguous vectors of int32, on any device."""

    op: str
    settings: PlanSettings
    tables: HostTables
    names: tuple[str, str, str]  # public names of indptr, indices and last_page_len
    buffers: tuple[torch.Tensor | None, ...]  # of captured graphs: qo_indptr, indptr, indices, last_page_len
    masks: MaskRequest
    non_blocking: bool
    run_shape: Shape | None = None  # float64 shape of the runs, for gradient checks without a kernel


Sizes = tuple[int, int, int, int | None]  # num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
Dtypes = tuple[str | torch.dtype, str | torch.dtype | None, str | torch.dtype | None]  # of q, of k and v, of the output
# pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
LogitOptions = tuple[str, int, float | None, float | None, float | None, float | None]
SplitOptions = tuple[int | None, bool]  # fixed_split_size, disable_split_kv


def plan_settings(
    op: str, sizes: Sizes, dtypes: Dtypes, causal: bool, logits: LogitOptions, split: SplitOptions, *page_size: int,
    default: SplitRule = BALANCED,
) -> PlanSettings:  # fmt: skip
    """Return the checked arguments of a plan.

    Args:
        page_size: only for a paged cache.
        default: the rule if ``split`` contains no option.

    Raises:
        ValueError, TypeError: an argument that does not fit.
    """
    return _plan_settings(op, causal, *sizes, *dtypes, *logits, *split, *default, *page_size)


@cached_by_value
def _plan_settings(op: str, causal: bool, *values: Any) -> PlanSettings:
    # The arguments are flat, because the cache distinguishes the types of arguments, but not of a tuple's elements.
    sizes, dtypes, logits, page_size = values[:4], values[4:7], values[7:13], values[17:]
    fixed_split_size, disable_split_kv = values[13:15]
    shape = Shape.of(op, *sizes, *dtypes)
    checked = logits_of(op, shape.head_dim_qk, *logits)
    size = positive(op, "page_size", *page_size) if page_size else None
    split_rule = split_rule_of(
        op, fixed_split_size, disable_split_kv, 1 if size is None else size, SplitRule(*values[15:17])
    )
    return PlanSettings(shape, Options(checked, CAUSAL if causal else NON_CAUSAL), split_rule, size)


def tables_on_host(request: PlanRequest) -> tuple[HostTables, torch.Tensor | None]:
    """Return the tables, and ``prefix_len`` of multi-item scoring, on the host. At most one copy reads a device."""
    queries, lens, indptr, indices, last = request.tables
    prefix_len = None if request.masks is NO_MASK_REQUEST else request.masks.prefix_len
    queries, lens, indptr, last, prefix_len = on_host(queries, lens, indptr, last, prefix_len)
    if indices is not None and not indices.is_cpu:
        indices = None
    qo_buffer, indptr_buffer, _, _ = request.buffers
    if qo_buffer is not None and queries is not None:
        check_batch_size(request.op, "qo_indptr", queries.numel() - 1, qo_buffer)
    if indptr_buffer is not None and request.settings.page_size is not None:
        check_batch_size(request.op, request.names[0], indptr.numel() - 1, indptr_buffer)
    return HostTables(queries, lens, indptr, indices, last), prefix_len


def key_tables(
    scheduler: Scheduler, host_plan: HostPlan, tables: Tables, request: PlanRequest
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the offsets and indices that kernels read. ``tables.commit()`` writes the buffers of captured graphs."""
    queries, _, indptr, indices, last = request.tables
    qo_buffer, indptr_buffer, indices_buffer, last_buffer = request.buffers
    if qo_buffer is not None and queries is not None:
        tables.to_device("qo_indptr", qo_buffer, queries)
    if last_buffer is not None and last is not None:
        tables.to_device(request.names[2], last_buffer, last)
    assert indptr is not None
    return scheduler.key_tables(
        host_plan, tables, request.names[:2], (indptr, indices), (indptr_buffer, indices_buffer)
    )


def raise_table_error(request: PlanRequest, host_tables: HostTables) -> NoReturn:
    """Raise an error that names the invalid table."""
    op, names, indptr, queries = request.op, request.names, host_tables.kv_indptr, host_tables.qo_indptr
    assert indptr is not None
    if queries is not None:
        check_offsets(op, "qo_indptr", queries)
    if request.settings.page_size is None or host_tables.last_page_len is None or request.tables.kv_indices is None:
        check_offsets(op, names[0], indptr, None if queries is None else queries.numel() - 1)
    else:
        last, indices = host_tables.last_page_len, request.tables.kv_indices
        check_pages(op, queries, request.settings.page_size, indptr, last, indices, names)
    raise ValueError(f"{called(op)}: {names[0]}: got tables that do not fit each other")
