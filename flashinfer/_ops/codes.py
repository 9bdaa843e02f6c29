"""Named integers that programs pass to functions."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """An integer with a name, for example a pattern or a layout. Its ``repr`` is the number.

    Engines pass codes to operators of their own inside a compiled graph. Inductor of torch 2.11 writes
    ``repr(argument)`` into the program that it generates, and ``<Enum.member: 1>`` would be a syntax error there.
    """

    __repr__ = int.__repr__
    __str__ = int.__repr__

    def __format__(self, format_spec: str) -> str:
        """Format the number."""
        return int.__format__(self, format_spec)
