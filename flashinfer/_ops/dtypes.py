"""Element types in one table, and the sets that arguments are checked against."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import type_error, value_error


class Element(NamedTuple):
    """An element type of tensors that kernels read."""

    name: str
    bits: int
    kind: str  # "float", "int" or "bool"
    short: str  # part of modules' names
    number: int  # value of DType in include/flashinfer/common/dtype.h

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.name)
        return found


ELEMENTS = (
    Element("float32", 32, "float", "f32", 1),
    Element("float16", 16, "float", "f16", 2),
    Element("bfloat16", 16, "float", "bf16", 3),
    Element("float8_e4m3fn", 8, "float", "e4m3", 8),
    Element("float8_e5m2", 8, "float", "e5m2", 9),
    Element("float64", 64, "float", "f64", 12),
    Element("int64", 64, "int", "i64", 5),
    Element("int32", 32, "int", "i32", 4),
    Element("int16", 16, "int", "i16", 14),
    Element("int8", 8, "int", "i8", 13),
    Element("uint32", 32, "int", "u32", 11),
    Element("uint16", 16, "int", "u16", 10),
    Element("uint8", 8, "int", "u8", 6),
    Element("bool", 8, "bool", "b8", 7),
)
NUMBERS = {one.dtype: one.number for one in ELEMENTS}


def _floats(*bits: int) -> tuple[torch.dtype, ...]:
    return tuple(one.dtype for one in ELEMENTS if one.kind == "float" and one.bits in bits)


FP8 = _floats(8)
HALVES = _floats(16)
FLOATS = _floats(32, 16)  # of most kernels
WIDE_FLOATS = _floats(64, 32, 16)


def dtype_of(op: str, name: str, value: object) -> torch.dtype:
    """Return a dtype, from its name or from the dtype itself.

    Raises:
        ValueError: the text is not the name of a dtype.
        TypeError: the value is neither a name nor a dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise type_error(op, name, type(value).__name__, "a torch.dtype or its name")
    found = getattr(torch, value, None)
    if not isinstance(found, torch.dtype):
        raise value_error(op, name, repr(value), "the name of a torch dtype such as 'float16'")
    return found


def is_fp8(dtype: torch.dtype) -> bool:
    """Return whether elements are floating-point numbers of 8 bits.

    The itemsize is not sufficient: integers, booleans and pairs of 4-bit numbers have an itemsize of 1 too.
    """
    return dtype in FP8
