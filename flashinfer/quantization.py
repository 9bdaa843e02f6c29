"""Packing of booleans into bits, the form of custom attention masks."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ._compat import elsewhere
from ._ops.declare import define
from ._ops.errors import check_one_device, type_error
from ._ops.indices import index_table
from ._ops.numbers import check_option
from .jit.frozen import refuse_capture
from .jit.modules.quantization import gen_quantization_module

__all__ = ["gen_quantization_module", "packbits", "segment_packbits"]

# FlashInfer has this name here. Its family is imported when it is used.
__getattr__ = elsewhere(__name__, {"per_token_group_quant_8bit": "group_quant"})


def _packed(x: torch.Tensor, little: bool) -> torch.Tensor:
    return x.new_empty(((x.shape[0] + 7) // 8,), dtype=torch.uint8)


def _packed_segments(x: torch.Tensor, indptr: torch.Tensor, little: bool) -> tuple[torch.Tensor, torch.Tensor]:
    length = (x.shape[0] + 7 * (indptr.shape[0] - 1)) // 8
    return x.new_empty((length,), dtype=torch.uint8), indptr.new_empty(indptr.shape)


_packbits = define("packbits(Tensor x, bool little) -> Tensor", gen_quantization_module, _packed)
# The fake result has the length of the worst case. The values of indptr define the real one, and they are not
# read here.
_segment_packbits = define(
    "segment_packbits(Tensor x, Tensor indptr, bool little) -> (Tensor, Tensor)",
    gen_quantization_module,
    _packed_segments,
)


def _is_little(op: str, bitorder: str) -> bool:
    check_option(op, "bitorder", bitorder, ("big", "little"))
    return bitorder == "little"


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack each eight booleans into the bits of a byte, like ``numpy.packbits``.

    The last byte is padded with 0.

    Args:
        x: ``[n]`` bool or uint8, contiguous; nonzero numbers count as 1.
        bitorder: ``"big"``: the first of eight is the highest bit; ``"little"``: the lowest.

    Returns:
        ``[ceil(n / 8)]`` uint8.

    Raises:
        ValueError: an invalid shape, strides or bit order.
        TypeError: another dtype.
    """
    return _packbits(x, _is_little("packbits", bitorder))  # type: ignore[no-any-return]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack segments of booleans. Each segment is padded with 0 to whole bytes.

    Args:
        x: ``[n]`` bool or uint8, contiguous; nonzero numbers count as 1.
        indptr: ``[num_segments + 1]`` ascending integers: segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``. On
            ``x``'s device, or on the CPU.
        bitorder: as for :func:`packbits`.

    Returns:
        ``(packed, packed_indptr)`` on ``x``'s device: ``[packed_indptr[-1]]`` uint8 and
        ``[num_segments + 1]`` int32 with
        ``packed_indptr[i + 1] - packed_indptr[i] == ceil((indptr[i + 1] - indptr[i]) / 8)``.

    Raises:
        ValueError: invalid shapes, strides, devices or bit order; on the CPU also an ``indptr`` that descends
            or exceeds ``x``. On CUDA a descending segment is empty, and elements outside of ``x`` count as 0.
        TypeError: invalid dtypes.

    The values of ``indptr`` define the length of ``packed``. If ``indptr`` is on CUDA, its last word is read
    back once, after all kernels are launched. This waits for the device (``CaptureError`` while a CUDA graph
    is captured). With ``indptr`` on the CPU nothing waits. Under ``torch.compile`` the read ends a graph.
    """
    little = _is_little("segment_packbits", bitorder)
    if not isinstance(x, torch.Tensor):
        raise type_error("segment_packbits", "x", type(x).__name__, "Tensor")
    if isinstance(indptr, torch.Tensor) and indptr.is_meta:
        check_one_device("segment_packbits", ("x", "indptr"), (x, indptr))
    indptr = index_table("segment_packbits", "indptr", indptr)
    if indptr.device == x.device:
        if x.is_cuda and not is_dynamo_compiling():
            refuse_capture("segment_packbits: the host would wait for indptr", "call it, or with indptr on the CPU")
        packed, packed_indptr = _segment_packbits(x, indptr, little)
        return packed[: packed_indptr[-1].item()], packed_indptr
    # Pageable memory is copied at once. A copy from pinned memory is safe from later writes only if it is
    # waited for.
    on_device = indptr if indptr.device.type != "cpu" else indptr.to(x.device, non_blocking=not indptr.is_pinned())
    packed, packed_indptr = _segment_packbits(x, on_device, little)
    return packed[: (indptr.diff().clamp(min=0) + 7).floor_divide(8).sum().item()], packed_indptr
