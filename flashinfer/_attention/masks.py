"""Masks other than causal: custom masks of the caller, and multi-item scoring after one prefix."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._ops.indices import INTEGERS, narrowed
from .._ops.numbers import whole
from .._ops.sizes import differs, exceeds
from ..quantization import packbits, segment_packbits
from .arguments import CUSTOM, MULTI_ITEM
from .tables import INT32_MAX, Batch, Tables, check_buffer


@dataclass(frozen=True)
class MaskTensors:
    """Tensors of the other mask modes, on the device."""

    packed: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    prefix_len: torch.Tensor | None = None
    token_pos_in_items: torch.Tensor | None = None
    token_pos_in_items_len: int = 0

    @property
    def mode(self) -> int | None:
        """Mask mode of the tensors, which has priority over ``causal``."""
        return MULTI_ITEM if self.prefix_len is not None else CUSTOM if self.packed is not None else None


NO_MASKS = MaskTensors()


@dataclass(frozen=True)
class MultiItem:
    """Checked arguments of multi-item scoring, from :func:`multi_item`."""

    prefix_len: torch.Tensor  # [batch_size] uint32
    token_pos_in_items: torch.Tensor  # uint16, token_pos_in_items_len of each request
    token_pos_in_items_len: int


def multi_item(
    op: str,
    prefix_len_ptr: object,
    token_pos_in_items_ptr: object,
    token_pos_in_items_len: Any,
    max_item_len_ptr: object,
) -> MultiItem | None:
    """Return the checked arguments, or ``None`` if all tables are ``None``.

    Of a single request each table may be one number. Each request's positions are filled up with zeros to
    their length, and those at the end of the last request need not be given.
    """
    given = {
        "prefix_len_ptr": prefix_len_ptr,
        "token_pos_in_items_ptr": token_pos_in_items_ptr,
        "max_item_len_ptr": max_item_len_ptr,
    }
    if all(x is None for x in given.values()):
        return None
    for name, x in given.items():
        if x is None:
            raise ValueError(f"{op}: {name}: got None, wanted all of {', '.join(given)} for multi-item scoring")
    prefix_len = _numbers(op, "prefix_len_ptr", prefix_len_ptr, torch.uint32)
    positions = _numbers(op, "token_pos_in_items_ptr", token_pos_in_items_ptr, torch.uint16)
    longest = _numbers(op, "max_item_len_ptr", max_item_len_ptr, torch.uint16)
    length, batch_size = whole(op, "token_pos_in_items_len", token_pos_in_items_len), prefix_len.numel()
    if length < 0:
        raise ValueError(f"{op}: token_pos_in_items_len: got {length}, wanted 0 or more")
    if longest.numel() != batch_size:
        raise ValueError(f"{op}: max_item_len_ptr: got {longest.numel()} elements, wanted {batch_size}")
    missing = batch_size * length - positions.numel()
    if not 0 <= missing <= length:
        raise ValueError(
            f"{op}: token_pos_in_items_ptr: got {positions.numel()} elements, wanted {batch_size * length}"
        )
    if missing:
        # View as signed numbers, because torch lacks operations of unsigned ones on some devices.
        positions = torch.nn.functional.pad(positions.view(torch.int16), (0, missing)).view(torch.uint16)
    return MultiItem(prefix_len, positions, length)


def _numbers(op: str, name: str, x: object, dtype: torch.dtype) -> torch.Tensor:
    """Check a table of multi-item scoring: integers, a vector or one number."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name}: got {x.dtype}, wanted {dtype} or other integers")
    if x.dim() > 1:
        raise ValueError(f"{op}: {name}: got shape {list(x.shape)}, wanted a vector")
    return narrowed(op, name, x, dtype).reshape(-1).contiguous()


def check_packed(op: str, packed: object, at_least: int) -> None:
    """Check a packed mask of at least so many bytes."""
    mask = check_buffer(op, "packed_custom_mask", packed, torch.uint8)
    if exceeds(at_least, mask.numel()):
        raise ValueError(f"{op}: packed_custom_mask: got {mask.numel()} bytes, wanted {at_least}")


def check_bits(op: str, custom_mask: object, shape: Sequence[int]) -> torch.Tensor:
    """Return a mask as a contiguous vector of booleans.

    It has this shape, this shape after a dimension of one, or as many elements in one dimension.
    """
    if not isinstance(custom_mask, torch.Tensor):
        raise TypeError(f"{op}: custom_mask: got {type(custom_mask).__name__}, wanted Tensor")
    if custom_mask.dtype != torch.bool:
        raise TypeError(f"{op}: custom_mask: got {custom_mask.dtype}, wanted torch.bool")
    if custom_mask.is_meta:
        raise ValueError(f"{op}: custom_mask: got one on meta, wanted one with elements")
    if custom_mask.dim() == len(shape) + 1 and custom_mask.shape[0] == 1:
        custom_mask = custom_mask[0]  # a batch of one request
    # Compare shapes, because the transposed mask has the same number of elements.
    wanted = shape if custom_mask.dim() == len(shape) else (math.prod(shape),)
    if custom_mask.dim() != len(wanted) or any(map(differs, custom_mask.shape, wanted)):
        flat = "" if len(shape) == 1 else f" or [{math.prod(shape)}]"
        raise ValueError(
            f"{op}: custom_mask: got shape {list(custom_mask.shape)}, wanted {list(shape)}{flat}, queries before keys"
        )
    return custom_mask.contiguous().view(-1)


def one_mask(
    op: str,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    qo_len: int,
    kv_len: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Return the packed mask of one request, or ``None``."""
    if packed_custom_mask is not None:
        check_packed(op, packed_custom_mask, (qo_len * kv_len + 7) // 8)
        return packed_custom_mask
    if custom_mask is None:
        return None
    return packbits(check_bits(op, custom_mask, (qo_len, kv_len)).to(device), bitorder="little")


@dataclass(frozen=True)
class MaskRequest:
    """Arguments of a plan for masks other than causal."""

    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    items: MultiItem | None = None
    buffers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # of packed masks and their offsets

    @property
    def mode(self) -> int | None:
        """Return the mask mode that is asked for, ``None`` for none beyond causal."""
        if self.items is not None:
            return MULTI_ITEM
        return None if self.custom_mask is None and self.packed_custom_mask is None else CUSTOM

    @property
    def prefix_len(self) -> torch.Tensor | None:
        return None if self.items is None else self.items.prefix_len


NO_MASK_REQUEST = MaskRequest()


def mask_request(
    op: str,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    prefix_len_ptr: object,
    token_pos_in_items_ptr: object,
    token_pos_in_items_len: Any,
    max_item_len_ptr: object,
    buffers: tuple[torch.Tensor | None, torch.Tensor | None],
) -> MaskRequest:
    """Return the checked arguments of those names. ``buffers``: of a captured graph."""
    items = multi_item(op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
    if custom_mask is None and packed_custom_mask is None and items is None:
        return NO_MASK_REQUEST
    return MaskRequest(custom_mask, packed_custom_mask, items, buffers)


def masks_of(
    tables: Tables, batch: Batch, wanted: MaskRequest, prefix_len: torch.Tensor | None, use_cuda_graph: bool
) -> MaskTensors:
    """Masks of a batch, on their way to the device; ``prefix_len`` is on the host."""
    assert batch.qo_indptr is not None
    qo_indptr, kv_lens, items, buffers = batch.qo_indptr, batch.kv_lens, wanted.items, wanted.buffers
    custom_mask, packed_custom_mask = wanted.custom_mask, wanted.packed_custom_mask
    op = tables.op
    if items is not None:
        if custom_mask is not None or packed_custom_mask is not None:
            raise ValueError(f"{op}: custom_mask, prefix_len_ptr: got both, wanted a mask or multi-item scoring")
        return _multi_item(tables, kv_lens, items, prefix_len)
    if custom_mask is None and packed_custom_mask is None:
        return MaskTensors()
    if use_cuda_graph and (buffers[0] is None or buffers[1] is None):
        raise ValueError(
            f"{op}: custom_mask: got one under CUDA graphs, wanted custom_mask_buf and mask_indptr_buf too"
        )
    qo_lens = qo_indptr.diff().to(torch.int64)
    bits = qo_lens * kv_lens
    total = int(bits.sum())
    if total > INT32_MAX:
        raise ValueError(f"{op}: custom_mask: got {total} elements in all, wanted at most {INT32_MAX}")
    if packed_custom_mask is None:
        mask = check_bits(op, custom_mask, _shape_of_masks(qo_lens.tolist(), kv_lens.tolist())).to(
            tables.device, non_blocking=tables.non_blocking
        )
        indptr = torch.nn.functional.pad(bits.cumsum(0), (1, 0)).to(torch.int32)
        packed, packed_indptr = segment_packbits(mask, indptr, bitorder="little")
    else:
        packed = packed_custom_mask
        packed_indptr = torch.nn.functional.pad((bits + 7).floor_divide(8).cumsum(0), (1, 0)).to(torch.int32)
        check_packed(op, packed, int(packed_indptr[-1]))
    return MaskTensors(
        packed=tables.take("custom_mask", buffers[0], packed),
        indptr=tables.take("mask_indptr", buffers[1], packed_indptr),
    )


def _shape_of_masks(qo_lens: list[int], kv_lens: list[int]) -> list[int]:
    """Return the shape of all masks of a batch: one matrix, equal matrices, or a flat sequence."""
    if len(qo_lens) == 1:
        return [qo_lens[0], kv_lens[0]]
    if len(qo_lens) > 1 and len(set(qo_lens)) == 1 and len(set(kv_lens)) == 1:
        return [len(qo_lens), qo_lens[0], kv_lens[0]]
    return [sum(map(operator.mul, qo_lens, kv_lens))]


def _multi_item(
    tables: Tables, kv_lens: torch.Tensor, items: MultiItem, prefix_len: torch.Tensor | None
) -> MaskTensors:
    op, length = tables.op, items.token_pos_in_items_len
    assert prefix_len is not None
    if prefix_len.numel() != kv_lens.numel():
        raise ValueError(f"{op}: prefix_len_ptr: got {prefix_len.numel()} elements, wanted {kv_lens.numel()}")
    behind = kv_lens.to(torch.int64) - prefix_len.to(torch.int64)
    if kv_lens.numel() and int(behind.max()) > length:
        at = int(behind.argmax())
        raise ValueError(
            f"{op}: token_pos_in_items_len: got {length}, and request {at} has {int(behind[at])} keys behind its prefix"
        )
    return MaskTensors(
        prefix_len=tables.take("prefix_len_ptr", None, items.prefix_len),
        token_pos_in_items=tables.take("token_pos_in_items_ptr", None, items.token_pos_in_items),
        token_pos_in_items_len=length,
    )
