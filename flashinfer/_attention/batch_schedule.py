"""Schedules of a batch from tensors of lengths: the lists of a plan, written on the device.

The host knows the sizes of a batch but not its lengths. Capacities of the lists therefore serve any lengths, and a
CUDA graph captures the schedule with the kernels that read it.
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
from .lists import Lists, Shape
from .operators import OF_BATCH, Operators, builtin_operators, custom_operators, named, number_of_variant
from .planner import FIXED_TILE_ROWS
from .signature import HostTables

ALIGNMENT = 32  # bytes, of the lists
# Kernels of one query for each request. "": the portable ones, which the wrapper's "auto" selects too. "sm90a" saves
# the launch of a merge kernel on GPUs of 9.0. It is not in the AOT matrix.
DECODE_KERNELS = ""
MASK_ROWS = 64  # the most rows of a tile of a variant with a mask: with 128, ptxas spills registers
MASK_ROWS_WIDE = 32  # of heads with more than 256 elements, whose tiles have 16, 32 or 128 rows
_HEADER = 16
_TILE_ROWS, _MAX_ITEMS = 2, 5


class Kernels(NamedTuple):
    """Kernels of a batch, and the properties that its schedule needs."""

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
        soft_cap: the variant without a mask caps logits.
        invariant: neither tiles nor splits depend on the batch. One worker splits nothing.

    Raises:
        ValueError: dtypes or sizes without kernels.
    """
    try:
        operators = _operators(shape, mask, device, family, soft_cap)
    except ValueError as err:
        raise named(op, err, OF_BATCH) from None
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
    serves = DECODE_KERNELS and decode.why_not(DECODE_KERNELS) is None and can_be_loaded(decode, DECODE_KERNELS)
    return builtin_operators("decode", device.type, dtypes, head_dims, 0, DECODE_KERNELS if serves else device.type)


def _limits(
    operators: Operators, shape: Shape, q_len: int, device: torch.device, tile_rows: int = 0
) -> tuple[int, int]:
    """Return the rows of a tile and the number of workers, from a plan of one request on the host."""
    header = torch.empty(_HEADER, dtype=torch.int32, device="cpu")
    numbers = shape.plan_numbers(0, -1, device.index or 0, 0, 0, tile_rows)._replace(variant=operators.variant)
    queries = torch.tensor([0, q_len], dtype=torch.int32, device="cpu")
    operators.plan(header, numbers.tensor(), *HostTables(queries, torch.ones(1, dtype=torch.int32, device="cpu")))
    tile_rows, most = int(header[_TILE_ROWS]), int(header[_MAX_ITEMS])
    tiles = q_len * (shape.num_qo_heads // shape.num_kv_heads) // tile_rows + 1
    return tile_rows, max(most - tiles - 1, 1)


class Places(NamedTuple):
    """Offsets in the workspace of a schedule, in bytes, and sizes of its lists."""

    max_items: int
    max_merges: int
    max_slots: int
    slot_rows: int
    lists: int  # elements of int32
    indptr: int
    numbers: int
    partials: int
    size: int


@lru_cache(maxsize=1024)
def places_of(shape: Shape, batch_size: int, q_len: int, tile_rows: int, workers: int) -> Places:
    """Return the places for any lengths of ``batch_size`` requests. csrc/batch_schedule.cc has the same bounds."""
    heads, rows = shape.num_kv_heads, q_len * (shape.num_qo_heads // shape.num_kv_heads)
    tiles = batch_size * -(-rows // tile_rows)
    items, merges, slots = tiles + workers, min(tiles, workers), 2 * workers
    first_item = -(-(_HEADER + 2 * batch_size) // 8) * 8 + 8 * merges
    lists = first_item + 8 * items + merges * heads
    indptr = _aligned(4 * lists)
    numbers = _aligned(indptr + 4 * (batch_size + 1))
    partials, slot_rows = _aligned(numbers + 32), min(rows, tile_rows)
    size = partials + 4 * slots * heads * slot_rows * (shape.head_dim_vo + 2)
    return Places(items, merges, slots, slot_rows, lists, indptr, numbers, partials, size)


def _aligned(used: int) -> int:
    return -(-used // ALIGNMENT) * ALIGNMENT


class Views(NamedTuple):
    """Parts of a workspace."""

    plan: torch.Tensor
    kv_indptr: torch.Tensor
    numbers: torch.Tensor
    partials: torch.Tensor


# Workspace -> its address, and its parts by places. Views cost more than a launch.
_views: Any = WeakIdKeyDictionary()
_MOST_VIEWS = 64  # of a workspace


def _views_of(op: str, workspace: torch.Tensor, places: Places, batch_size: int) -> Views:
    if is_compiling():
        return _make_views(op, workspace, places, batch_size)
    known = _views.get(workspace)
    if known is None or known[0] != workspace.data_ptr():
        known = _views[workspace] = (workspace.data_ptr(), {})
    views: Views | None = known[1].get(places)
    if views is None:
        if len(known[1]) >= _MOST_VIEWS:
            known[1].clear()
        # A view of the tensor itself would keep it alive.
        views = known[1][places] = _make_views(op, workspace.detach(), places, batch_size)
    return views


def _make_views(op: str, workspace: torch.Tensor, places: Places, batch_size: int) -> Views:
    part = workspace.view(-1).view(torch.uint8)
    part = part[-part.data_ptr() % ALIGNMENT :]
    if part.numel() < places.size:
        wanted = f"{places.size} for {batch_size} requests"
        raise value_error(op, "workspace_buffer", f"{part.numel()} bytes from a multiple of 32", wanted)
    return Views(
        part[: 4 * places.lists].view(torch.int32),
        part[places.indptr : places.indptr + 4 * (batch_size + 1)].view(torch.int32),
        part[places.numbers : places.numbers + 32].view(torch.float64),
        part[places.partials :],
    )


class Schedule(NamedTuple):
    """A schedule on the device."""

    kv_indptr: torch.Tensor
    numbers: torch.Tensor | None
    lists: Lists


def schedule(
    op: str,
    workspace: torch.Tensor,
    shape: Shape,
    kernels: Kernels,
    places: Places,
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
    """Make the schedule of a batch in a workspace. Runs use it until the next schedule overwrites it.

    Args:
        op: the function to name in errors.
        workspace: bytes, contiguous.
        shape, kernels, places: the runs, their kernels, and their places in the workspace.
        seq_lens: ``[batch_size]`` int32, keys of each request. Values are clamped to 0 and ``most_keys``.
        qo_indptr: ``[batch_size + 1]`` int32, first queries of the requests, or ``None`` for ``q_len`` queries of each.
        num_tokens, q_len: queries of all requests, and the most of one.
        table_stride: entries of the page table from one request to the next.
        mask_mode, window_left: masks that hide keys from all rows of a tile.
        sm_scale: a scale on the device that replaces the parameter, float32, or ``None``.

    Raises:
        ValueError: a workspace that is too small.
    """
    batch_size = seq_lens.numel()
    plan, kv_indptr, numbers, partials = _views_of(op, workspace, places, batch_size)
    given = None if sm_scale is None else numbers
    schedule_batch(
        plan, kv_indptr, given, seq_lens, qo_indptr, sm_scale, num_tokens, q_len, most_keys, table_stride,
        shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads, kernels.tile_rows, mask_mode, window_left,
        kernels.workers,
    )  # fmt: skip
    lists = Lists(
        plan, partials, batch_size, places.max_items, places.max_merges, places.max_slots, kernels.tile_rows,
        places.slot_rows,
    )  # fmt: skip
    return Schedule(kv_indptr, given, lists)
