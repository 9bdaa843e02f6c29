"""Quantisation to 4-bit types with block scales: names that engines import.

Only SM100 and newer support them.
"""

from __future__ import annotations

from ._compat.refused import declare
from ._ops.codes import Code


class SfLayout(Code):
    """Layout of the scales of a block-scaled tensor."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


__all__ = sorted(["SfLayout", *declare(globals())])
