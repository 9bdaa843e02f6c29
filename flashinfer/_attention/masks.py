"""Masks other than causal: custom masks of the caller, and multi-item scoring after one prefix."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .._ops.arguments import all_or_none, check_not_both, check_present
from .._ops.errors import called
from .._ops.indices import index_table
from .._ops.numbers import check_range, whole
from .._ops.sizes import differs
from .._ops.tensors import check_count, check_dtype, check_not_meta, check_tensor, check_vector
from ..quantization import packbits, segment_packbits
from .arguments import CUSTOM, MULTI_ITEM
from .tables import INT32_MAX, Batch, Tables


@dataclass(frozen=True)
class MaskTensors:
    """Tensors of a custom mask or of multi-item scoring, on the device."""

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

    For a single request, a table may be one number. The positions of each request end with zeros, up to
    ``token_pos_in_items_len`` elements. The last request may omit its zeros.
    """
    if prefix_len_ptr is token_pos_in_items_ptr is max_item_len_ptr is None:
        return None
    all_or_none(
        op, prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
        max_item_len_ptr=max_item_len_ptr,
    )  # fmt: skip
    prefix_len = _numbers(op, "prefix_len_ptr", prefix_len_ptr, torch.uint32)
    positions = _numbers(op, "token_pos_in_items_ptr", token_pos_in_items_ptr, torch.uint16)
    longest = _numbers(op, "max_item_len_ptr", max_item_len_ptr, torch.uint16)
    length, batch_size = whole(op, "token_pos_in_items_len", token_pos_in_items_len, 0), prefix_len.numel()
    check_count(op, "max_item_len_ptr", longest, batch_size)
    most = batch_size * length
    check_range(op, "token_pos_in_items_ptr", positions.numel(), most - length, most, "elements")
    missing = most - positions.numel()
    if missing:
        # View as signed numbers, because torch lacks operations of unsigned ones on some devices.
        positions = torch.nn.functional.pad(positions.view(torch.int16), (0, missing)).view(torch.uint16)
    return MultiItem(prefix_len, positions, length)


def _numbers(op: str, name: str, x: object, dtype: torch.dtype) -> torch.Tensor:
    """Check a table of multi-item scoring: integers, a vector or one number."""
    scalar = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dim() == 0
    return index_table(op, name, cast(torch.Tensor, x).reshape(1) if scalar else x, dtype)


def check_packed(op: str, packed: object, at_least: int) -> None:
    """Check a packed mask of ``at_least`` bytes or more."""
    mask = check_vector(op, "packed_custom_mask", packed, torch.uint8)
    check_range(op, "packed_custom_mask", mask.numel(), at_least, unit="bytes")


def check_bits(op: str, custom_mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a mask as a contiguous vector of booleans.

    The mask has the shape ``shape`` or ``[1, *shape]``, or is a vector with as many elements.
    """
    check_tensor(op, "custom_mask", custom_mask)
    check_dtype(op, "custom_mask", custom_mask.dtype, (torch.bool,))
    check_not_meta(op, "custom_mask", custom_mask)
    if custom_mask.dim() == len(shape) + 1 and custom_mask.shape[0] == 1:
        custom_mask = custom_mask[0]  # a batch of one request
    # Compare shapes, because the transposed mask has the same number of elements.
    wanted = shape if custom_mask.dim() == len(shape) else (math.prod(shape),)
    if custom_mask.dim() != len(wanted) or any(map(differs, custom_mask.shape, wanted)):
        flat = "" if len(shape) == 1 else f" or [{math.prod(shape)}]"
        got = list(custom_mask.shape)
        raise ValueError(f"{called(op)}: custom_mask: got shape {got}, wanted {list(shape)}{flat}, queries before keys")
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
        """Return the requested mask mode, or ``None`` if only the causal mask applies."""
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
    """Return the checked arguments. ``buffers`` are the buffers of a captured graph for masks."""
    items = multi_item(op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
    if custom_mask is None and packed_custom_mask is None and items is None:
        return NO_MASK_REQUEST
    return MaskRequest(custom_mask, packed_custom_mask, items, buffers)


def masks_of(
    tables: Tables, batch: Batch, request: MaskRequest, prefix_len: torch.Tensor | None, use_cuda_graph: bool
) -> MaskTensors:
    """Return the masks of a batch on the device. ``prefix_len`` is on the host."""
    assert batch.qo_indptr is not None
    qo_indptr, kv_lens, items, buffers = batch.qo_indptr, batch.kv_lens, request.items, request.buffers
    custom_mask, packed_custom_mask = request.custom_mask, request.packed_custom_mask
    op = tables.op
    if items is not None:
        for name, mask in (("custom_mask", custom_mask), ("packed_custom_mask", packed_custom_mask)):
            check_not_both(op, name, mask, "prefix_len_ptr", items)
        return _multi_item(tables, kv_lens, items, prefix_len)
    if custom_mask is None and packed_custom_mask is None:
        return MaskTensors()
    if use_cuda_graph:
        for name, buffer in zip(("custom_mask_buf", "mask_indptr_buf"), buffers, strict=True):
            check_present(op, name, buffer, "one for a custom_mask under CUDA graphs")
    qo_lens = qo_indptr.diff().to(torch.int64)
    bits = qo_lens * kv_lens
    check_range(op, "custom_mask", int(bits.sum()), most=INT32_MAX, unit="elements in all")
    if packed_custom_mask is None:
        assert custom_mask is not None
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
        packed=tables.to_device("custom_mask", buffers[0], packed),
        indptr=tables.to_device("mask_indptr", buffers[1], packed_indptr),
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
    check_count(op, "prefix_len_ptr", prefix_len, kv_lens.numel())
    if kv_lens.numel():
        least = int((kv_lens.to(torch.int64) - prefix_len.to(torch.int64)).max())
        check_range(op, "token_pos_in_items_len", length, least, why=", the largest number of keys after a prefix")
    return MaskTensors(
        prefix_len=tables.to_device("prefix_len_ptr", None, items.prefix_len),
        token_pos_in_items=tables.to_device("token_pos_in_items_ptr", None, items.token_pos_in_items),
        token_pos_in_items_len=length,
    )
