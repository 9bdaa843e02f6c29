"""Schedules that the device computes from a tensor of lengths, in the form of a plan's work lists.

The host knows the size of a batch but not its lengths. The lists therefore have room for any lengths. A CUDA graph
captures the schedule together with the kernels that read it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from .._ops.errors import value_error
from ..batch_schedule import schedule_batch
from ..jit.modules._attention import dtypes_value, head_dims_value, mask_spec
from .arguments import NON_CAUSAL
from .kernels import CallProperties, can_be_loaded
from .lists import Shape, WorkLists
from .operators import BATCH_NAMES, Operators, builtin_operators, custom_operators, number_of_variant, public_error
from .planner import FIXED_TILE_ROWS
from .signature import HostTables

ALIGNMENT = 32  # bytes, of the lists
# Kernels for one query per request. "": the portable kernels, as with backend "auto" of the wrapper. "sm90a" saves the
# launch of a merge kernel on GPUs of 9.0. It is not in the AOT matrix.
DECODE_KERNELS = ""
MASK_ROWS = 64  # largest tile of a variant with a mask, in rows: with 128, ptxas spills registers
MASK_ROWS_WIDE = 32  # the same for heads of more than 256 elements, which have tiles of 16, 32 or 128 rows
_HEADER = 16
_TILE_ROWS, _MAX_ITEMS = 2, 5


class Kernels(NamedTuple):
    """Kernels of a batch, and the parameters of its schedule."""

    operators: Operators
    tile_rows: int
    workers: int  # CTAs of one key head that run concurrently


@lru_cache(maxsize=256)
def kernels_of(
    op: str, shape: Shape, q_len: int, mask: str, device: torch.device, family: str, soft_cap: bool = False,
    invariant: bool = False,
) -> Kernels:  # fmt: skip
    """Return the kernels for at most ``q_len`` queries of each request.

    Args:
        mask: a variant of :data:`flashinfer.jit.modules._attention.MASKS`, or ``""``.
        family: ``decode``, whose requests have one query, or ``prefill``.
        soft_cap: select the variant with a soft cap. Only for ``mask = ""``.
        invariant: tiles and splits do not depend on the batch. A schedule for one worker splits no request.

    Raises:
        ValueError: dtypes or sizes without kernels.
    """
    try:
        operators = _operators(shape, mask, device, family, soft_cap)
    except ValueError as err:
        raise public_error(op, err, BATCH_NAMES) from None
    fixed = FIXED_TILE_ROWS if invariant and family == "prefill" else 0
    tile_rows, workers = _limits(operators, shape, q_len, device, fixed)
    most_rows = MASK_ROWS_WIDE if shape.head_dim_vo > 256 else MASK_ROWS
    if mask and tile_rows > most_rows:
        tile_rows, workers = _limits(operators, shape, q_len, device, most_rows)
    return Kernels(operators, tile_rows, 1 if invariant else workers)


def _operators(shape: Shape, mask: str, device: torch.device, family: str, soft_cap: bool) -> Operators:
    dtypes, head_dims = (shape.dtype_q, shape.dtype_kv, shape.dtype_o), (shape.head_dim_qk, shape.head_dim_vo)
    if mask:
        values = dtypes_value(*dtypes, device.type), head_dims_value(*head_dims, device.type)
        return custom_operators(mask_spec(mask, device.type, *values))
    if family == "prefill":
        return builtin_operators(family, device.type, dtypes, head_dims, number_of_variant(0, soft_cap), device.type)
    group = shape.num_qo_heads // shape.num_kv_heads
    decode = CallProperties("decode", device, dtypes, head_dims, 0, False, NON_CAUSAL, group)
    supported = DECODE_KERNELS and decode.unsupported_reason(DECODE_KERNELS) is None
    serves = supported and can_be_loaded(decode, DECODE_KERNELS)
    return builtin_operators("decode", device.type, dtypes, head_dims, 0, DECODE_KERNELS if serves else device.type)


def _limits(
    operators: Operators, shape: Shape, q_len: int, device: torch.device, tile_rows: int = 0
) -> tuple[int, int]:
    """Return the rows of a tile and the number of workers. They come from a plan of one request on the host."""
    header = torch.empty(_HEADER, dtype=torch.int32, device="cpu")
    numbers = shape.plan_numbers(0, -1, device.index or 0, 0, 0, tile_rows)._replace(variant=operators.variant)
    queries = torch.tensor([0, q_len], dtype=torch.int32, device="cpu")
    operators.plan(header, numbers.tensor(), *HostTables(queries, torch.ones(1, dtype=torch.int32, device="cpu")))
    tile_rows, most = int(header[_TILE_ROWS]), int(header[_MAX_ITEMS])
    tiles = q_len * (shape.num_qo_heads // shape.num_kv_heads) // tile_rows + 1
    return tile_rows, max(most - tiles - 1, 1)


class ScheduleLayout(NamedTuple):
    """Layout of a schedule in its workspace: capacities of its lists, and offsets in bytes."""

    max_items: int
    max_merges: int
    max_slots: int
    slot_rows: int
    lists: int  # size of the lists, in elements of int32
    indptr: int  # offset
    numbers: int  # offset
    partials: int  # offset
    size: int  # of the workspace


@lru_cache(maxsize=1024)
def schedule_layout_of(shape: Shape, batch_size: int, q_len: int, tile_rows: int, workers: int) -> ScheduleLayout:
    """Return the layout for ``batch_size`` requests of any lengths. csrc/batch_schedule.cc has the same capacities."""
    heads, rows = shape.num_kv_heads, q_len * (shape.num_qo_heads // shape.num_kv_heads)
    tiles = batch_size * -(-rows // tile_rows)
    items, merges, slots = tiles + workers, min(tiles, workers), 2 * workers
    first_item = -(-(_HEADER + 2 * batch_size) // 8) * 8 + 8 * merges
    lists = first_item + 8 * items + merges * heads
    indptr = _aligned(4 * lists)
    numbers = _aligned(indptr + 4 * (batch_size + 1))
    partials, slot_rows = _aligned(numbers + 32), min(rows, tile_rows)
    size = partials + 4 * slots * heads * slot_rows * (shape.head_dim_vo + 2)
    return ScheduleLayout(items, merges, slots, slot_rows, lists, indptr, numbers, partials, size)


def _aligned(used: int) -> int:
    return -(-used // ALIGNMENT) * ALIGNMENT


class ScheduleViews(NamedTuple):
    """Parts of a workspace that contain a schedule."""

    plan: torch.Tensor
    kv_indptr: torch.Tensor
    numbers: torch.Tensor
    partials: torch.Tensor


# Workspace -> its address, and its views by layout. They are cached, because making them takes longer than a launch.
_views: Any = WeakIdKeyDictionary()
_MOST_CACHED = 64  # of a workspace


def _cached_views(op: str, workspace: torch.Tensor, layout: ScheduleLayout, batch_size: int) -> ScheduleViews:
    if is_compiling():
        return _make_views(op, workspace, layout, batch_size)
    known = _views.get(workspace)
    if known is None or known[0] != workspace.data_ptr():
        known = _views[workspace] = (workspace.data_ptr(), {})
    views: ScheduleViews | None = known[1].get(layout)
    if views is None:
        if len(known[1]) >= _MOST_CACHED:
            known[1].clear()
        # detach(), because a cached view would keep the tensor alive.
        views = known[1][layout] = _make_views(op, workspace.detach(), layout, batch_size)
    return views


def _make_views(op: str, workspace: torch.Tensor, layout: ScheduleLayout, batch_size: int) -> ScheduleViews:
    part = workspace.view(-1).view(torch.uint8)
    part = part[-part.data_ptr() % ALIGNMENT :]
    if part.numel() < layout.size:
        wanted = f"{layout.size} for {batch_size} requests"
        raise value_error(op, "workspace_buffer", f"{part.numel()} bytes from a multiple of 32", wanted)
    return ScheduleViews(
        part[: 4 * layout.lists].view(torch.int32),
        part[layout.indptr : layout.indptr + 4 * (batch_size + 1)].view(torch.int32),
        part[layout.numbers : layout.numbers + 32].view(torch.float64),
        part[layout.partials :],
    )


class Schedule(NamedTuple):
    """A schedule on the device."""

    kv_indptr: torch.Tensor
    numbers: torch.Tensor | None
    lists: WorkLists


def schedule(
    op: str,
    workspace: torch.Tensor,
    shape: Shape,
    kernels: Kernels,
    layout: ScheduleLayout,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    num_tokens: int,
    q_len: int,
    most_keys: int,
    table_stride: int,
    mask_mode: int,
    window_left: int,
    sm_scale: torch.Tensor | None,
) -> Schedule:
    """Schedule a batch on the device. The schedule is valid until the next one overwrites the workspace.

    Args:
        op: the function to name in errors.
        workspace: bytes, contiguous.
        shape, kernels, layout: the heads, the kernels, and the layout of the workspace.
        seq_lens: ``[batch_size]`` int32, keys of each request. Values are clamped to 0 and ``most_keys``.
        qo_indptr: ``[batch_size + 1]`` int32, first queries of the requests, or ``None`` for ``q_len`` queries of each.
        num_tokens, q_len: queries of all requests, and of the longest one.
        most_keys: largest number of keys of a request.
        table_stride: entries of the page table from one request to the next.
        mask_mode, window_left: mask of the runs. The schedule omits keys that no row of a tile sees.
        sm_scale: float32 tensor with one element on the device, read by the kernels instead of their
            parameter ``sm_scale``, or ``None``.

    Raises:
        ValueError: a workspace that is too small.
    """
    batch_size = seq_lens.numel()
    plan, kv_indptr, numbers, partials = _cached_views(op, workspace, layout, batch_size)
    used_numbers = None if sm_scale is None else numbers
    schedule_batch(
        plan, kv_indptr, used_numbers, seq_lens, qo_indptr, sm_scale, num_tokens, q_len, most_keys, table_stride,
        shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads, kernels.tile_rows, mask_mode, window_left,
        kernels.workers,
    )  # fmt: skip
    lists = WorkLists(
        plan, partials, batch_size, layout.max_items, layout.max_merges, layout.max_slots, kernels.tile_rows,
        layout.slot_rows,
    )  # fmt: skip
    return Schedule(kv_indptr, used_numbers, lists)
