"""Packing booleans into bits, as custom attention masks are."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ._ops.declare import define
from ._ops.errors import check_one_device
from ._ops.indices import index_table
from .jit.capture import refuse_capture
from .jit.modules.quantization import gen_quantization_module

__all__ = ["gen_quantization_module", "packbits", "segment_packbits"]


def _packed(x: torch.Tensor, little: bool) -> torch.Tensor:
    return x.new_empty(((x.shape[0] + 7) // 8,), dtype=torch.uint8)


def _packed_segments(x: torch.Tensor, indptr: torch.Tensor, little: bool) -> tuple[torch.Tensor, torch.Tensor]:
    room = (x.shape[0] + 7 * (indptr.shape[0] - 1)) // 8
    return x.new_empty((room,), dtype=torch.uint8), indptr.new_empty(indptr.shape)


_packbits = define("packbits(Tensor x, bool little) -> Tensor", gen_quantization_module, _packed)
# As long as the worst case: how long the result is, indptr's values say, and a device's values are not read here.
_segment_packbits = define(
    "segment_packbits(Tensor x, Tensor indptr, bool little) -> (Tensor, Tensor)",
    gen_quantization_module,
    _packed_segments,
)


def _is_little(op: str, bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise ValueError(f"{op}: bitorder: got {bitorder!r}, wanted 'big' or 'little'")
    return bitorder == "little"


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack booleans into the bits of bytes, eight in each, as ``numpy.packbits`` does; the last byte is padded with 0.

    Args:
        x: ``[n]`` bool or uint8, contiguous; what is not zero counts as 1.
        bitorder: ``"big"``: the first of eight is the highest bit; ``"little"``: the lowest.

    Returns:
        ``[ceil(n / 8)]`` uint8.

    Raises:
        ValueError: a shape, strides or bit order that do not fit.
        TypeError: another dtype.
    """
    return _packbits(x, _is_little("packbits", bitorder))  # type: ignore[no-any-return]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack segments of booleans, each padded with 0 to whole bytes of its own.

    Args:
        x: ``[n]`` bool or uint8, contiguous; what is not zero counts as 1.
        indptr: ``[num_segments + 1]`` integers, rising: segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``. On ``x``'s device, or on
            the CPU.
        bitorder: as for :func:`packbits`.

    Returns:
        ``(packed, packed_indptr)`` on ``x``'s device: ``[packed_indptr[-1]]`` uint8 and ``[num_segments + 1]`` int32 with
        ``packed_indptr[i + 1] - packed_indptr[i] == ceil((indptr[i + 1] - indptr[i]) / 8)``.

    Raises:
        ValueError: shapes, strides, devices or a bit order that do not fit; on the CPU also an ``indptr`` that falls or leaves
            ``x``. On CUDA a falling segment counts as empty, and what lies outside of ``x`` as 0.
        TypeError: dtypes that do not fit.

    How long ``packed`` is, the values of ``indptr`` say. Where ``indptr`` is on CUDA, its last word is read back once, after
    all kernels are launched, which waits for the device (``CaptureError`` while a CUDA graph is captured); with ``indptr`` on the
    CPU nothing is waited for. Under ``torch.compile`` the read ends a graph.
    """
    little = _is_little("segment_packbits", bitorder)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"segment_packbits: x: got {type(x).__name__}, wanted Tensor")
    if isinstance(indptr, torch.Tensor) and indptr.is_meta:
        check_one_device("segment_packbits", ("x", "indptr"), (x, indptr))
    indptr = index_table("segment_packbits", "indptr", indptr)
    if indptr.device == x.device:
        if x.is_cuda and not is_dynamo_compiling():
            refuse_capture("segment_packbits: the host would wait for indptr", "call it, or with indptr on the CPU")
        packed, packed_indptr = _segment_packbits(x, indptr, little)
        return packed[: packed_indptr[-1].item()], packed_indptr
    # Copied at once from pageable memory; from pinned memory only a copy that is waited for is safe from later writes.
    on_device = indptr if indptr.device.type != "cpu" else indptr.to(x.device, non_blocking=not indptr.is_pinned())
    packed, packed_indptr = _segment_packbits(x, on_device, little)
    return packed[: (indptr.diff().clamp(min=0) + 7).floor_divide(8).sum().item()], packed_indptr
