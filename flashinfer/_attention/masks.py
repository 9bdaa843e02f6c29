"""Masks beyond causal ones: bits of the caller's, and scoring of many items behind one prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..quantization import packbits, segment_packbits
from .arguments import CUSTOM, MULTI_ITEM
from .schedule import INT32_MAX, check_table
from .traced import differs, exceeds

if TYPE_CHECKING:
    from .wrapper import Tables


@dataclass(frozen=True)
class MaskTensors:
    """What the mask modes beyond causal read, on the device."""

    packed: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    prefix_len: torch.Tensor | None = None
    token_pos_in_items: torch.Tensor | None = None
    token_pos_in_items_len: int = 0
    max_item_len: torch.Tensor | None = None

    @property
    def mode(self) -> int | None:
        """The mode that they ask for, whatever ``causal`` is."""
        return MULTI_ITEM if self.prefix_len is not None else CUSTOM if self.packed is not None else None


@dataclass(frozen=True)
class MultiItem:
    """The four arguments of multi-item scoring."""

    prefix_len_ptr: torch.Tensor | None = None
    token_pos_in_items_ptr: torch.Tensor | None = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: torch.Tensor | None = None

    @property
    def wanted(self) -> bool:
        return any(x is not None for x in (self.prefix_len_ptr, self.token_pos_in_items_ptr, self.max_item_len_ptr))

    def check(self, op: str, batch_size: int) -> None:
        names = ("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr")
        for name, dtype in zip(names, (torch.uint32, torch.uint16, torch.uint16), strict=True):
            if getattr(self, name) is None:
                raise ValueError(f"{op}: {name}: got None, wanted all of {', '.join(names)} for multi-item scoring")
            check_table(op, name, getattr(self, name), dtype)
        length = self.token_pos_in_items_len
        if length < 0:
            raise ValueError(f"{op}: token_pos_in_items_len: got {length}, wanted 0 or more")
        for name, count in zip(names, (batch_size, batch_size * length, batch_size), strict=True):
            got = getattr(self, name).numel()
            if got != count:
                raise ValueError(f"{op}: {name}: got {got} elements, wanted {count}")


def check_packed(op: str, packed: object, at_least: int) -> None:
    check_table(op, "packed_custom_mask", packed, torch.uint8)
    assert isinstance(packed, torch.Tensor)
    if exceeds(at_least, packed.numel()):
        raise ValueError(f"{op}: packed_custom_mask: got {packed.numel()} bytes, wanted {at_least}")


def check_bits(op: str, custom_mask: object, wanted: int) -> torch.Tensor:
    """The mask as a contiguous vector of booleans."""
    if not isinstance(custom_mask, torch.Tensor):
        raise TypeError(f"{op}: custom_mask: got {type(custom_mask).__name__}, wanted Tensor")
    if custom_mask.dtype != torch.bool:
        raise TypeError(f"{op}: custom_mask: got {custom_mask.dtype}, wanted torch.bool")
    if differs(custom_mask.numel(), wanted):
        raise ValueError(f"{op}: custom_mask: got {custom_mask.numel()} elements, wanted {wanted}, queries times keys")
    return custom_mask.contiguous().view(-1)


def one_mask(
    op: str,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    qo_len: int,
    kv_len: int,
    device: torch.device,
) -> torch.Tensor | None:
    """The packed mask of one request, or ``None``."""
    if packed_custom_mask is not None:
        check_packed(op, packed_custom_mask, (qo_len * kv_len + 7) // 8)
        return packed_custom_mask
    if custom_mask is None:
        return None
    return packbits(check_bits(op, custom_mask, qo_len * kv_len).to(device), bitorder="little")


def masks_of(
    tables: Tables,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    items: MultiItem,
    prefix_len: torch.Tensor | None,
    buffers: tuple[torch.Tensor | None, torch.Tensor | None],
    use_cuda_graph: bool,
) -> MaskTensors:
    """Masks of a batch, on their way to the device; ``qo_indptr``, ``kv_lens`` and ``prefix_len`` are on the host."""
    op = tables.op
    if items.wanted:
        if custom_mask is not None or packed_custom_mask is not None:
            raise ValueError(f"{op}: custom_mask, prefix_len_ptr: got both, wanted a mask or multi-item scoring")
        return _multi_item(tables, kv_lens, items, prefix_len)
    if custom_mask is None and packed_custom_mask is None:
        return MaskTensors()
    if use_cuda_graph and (buffers[0] is None or buffers[1] is None):
        raise ValueError(
            f"{op}: custom_mask: got one under CUDA graphs, wanted custom_mask_buf and mask_indptr_buf too"
        )
    bits = qo_indptr.diff().to(torch.int64) * kv_lens
    total = int(bits.sum())
    if total > INT32_MAX:
        raise ValueError(f"{op}: custom_mask: got {total} elements in all, wanted at most {INT32_MAX}")
    if packed_custom_mask is None:
        mask = check_bits(op, custom_mask, total).to(tables.device, non_blocking=tables.non_blocking)
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


def _multi_item(
    tables: Tables, kv_lens: torch.Tensor, items: MultiItem, prefix_len: torch.Tensor | None
) -> MaskTensors:
    op, length = tables.op, items.token_pos_in_items_len
    items.check(op, kv_lens.numel())
    assert prefix_len is not None and items.prefix_len_ptr is not None
    assert items.token_pos_in_items_ptr is not None and items.max_item_len_ptr is not None
    behind = kv_lens.to(torch.int64) - prefix_len.to(torch.int64)
    if kv_lens.numel() and int(behind.max()) > length:
        at = int(behind.argmax())
        raise ValueError(
            f"{op}: token_pos_in_items_len: got {length}, and request {at} has {int(behind[at])} keys behind its prefix"
        )
    return MaskTensors(
        prefix_len=tables.take("prefix_len_ptr", None, items.prefix_len_ptr),
        token_pos_in_items=tables.take("token_pos_in_items_ptr", None, items.token_pos_in_items_ptr),
        token_pos_in_items_len=length,
        max_item_len=tables.take("max_item_len_ptr", None, items.max_item_len_ptr),
    )
