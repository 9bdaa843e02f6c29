"""Planned runs under ``torch.compile``: one operator whose arguments are what a plan says, sizes among them.

A module's own ``run`` would be compiled for the numbers of one plan. This one is compiled for all plans of a wrapper: it
finds the module's by its name when the graph runs. Partial results lie in memory of the call: a workspace that a graph
writes would be one of its mutated inputs, which CUDA graphs of ``torch.compile`` do not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .._ops.declare import define_in_python


def _attend_planned(
    module: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    plan: torch.Tensor,
    rows: int,
    kv_rows: int,
    batch_size: int,
    max_items: int,
    max_merges: int,
    max_slots: int,
    tile_rows: int,
    slot_rows: int,
    *rest: Any,
) -> None:
    layout = rest[6]
    got = k.shape[0] if k.dim() == 4 else k.shape[layout]
    # Sizes of which a graph knows nothing have not been compared with the plan's.
    if q.shape[0] < rows or got < kv_rows:
        raise ValueError(
            f"{op}: q, k: got {q.shape[0]} queries and {got} rows or pages of keys, and the plan is for {rows} and {kv_rows}"
        )
    heads = k.shape[k.dim() - 2 - layout]
    partial = None
    if max_slots:
        size = max_slots * heads * slot_rows * (v.shape[-1] + 1)
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
    getattr(torch.ops, module).run(
        q, k, v, out, lse, kv_indptr, kv_indices, plan, partial, batch_size, max_items, max_merges, max_slots,
        tile_rows, slot_rows, *rest,
    )  # fmt: skip


define_in_python(
    "attend_planned(str module, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse,"
    " Tensor? kv_indptr, Tensor? kv_indices, Tensor plan, SymInt rows, SymInt kv_rows, SymInt batch_size,"
    " SymInt max_items, SymInt max_merges, SymInt max_slots, SymInt tile_rows, SymInt slot_rows, Tensor? custom_mask,"
    " Tensor? mask_indptr, Tensor? prefix_len, Tensor? token_pos_in_items, SymInt token_pos_in_items_len,"
    " Tensor? max_item_len, int kv_layout, int mask_mode, SymInt window_left, float o_scale, float rope_scale,"
    " float rope_theta, int variant, Tensor? slopes, Tensor? numbers, float sm_scale, float logits_soft_cap) -> ()",
    _attend_planned,
)


# Far from any size of any tensor, and from each other: torch takes sizes that are equal once for one and the same.
_APART = 1 << 40
_NOTHING = torch.empty(0)


def as_shape(sizes: Sequence[int]) -> torch.Tensor:
    """Sizes of a plan as those of a tensor without elements, which a graph follows from plan to plan.

    Integers it would take for constants, where they are attributes of what a module or a global variable holds.
    """
    shape = (0, *(_APART * (number + 1) + size for number, size in enumerate(sizes)))
    return _NOTHING.as_strided(shape, (0,) * len(shape))


def from_shape(carrier: torch.Tensor) -> list[int]:
    """The sizes that :func:`as_shape` was given."""
    return [size - _APART * (number + 1) for number, size in enumerate(carrier.shape[1:])]


def differs(got: int, wanted: int) -> bool:
    """Whether a size is another one, so far as is known: of some a graph knows nothing before it runs."""
    return _known(got != wanted) if is_dynamo_compiling() else got != wanted


def exceeds(got: int, limit: int) -> bool:
    """Whether a size is larger, so far as is known."""
    return _known(got > limit) if is_dynamo_compiling() else got > limit


def _known(condition: bool) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
