"""Comparisons of sizes, also of sizes that ``torch.compile`` knows only when the graph runs."""

from __future__ import annotations

from torch.compiler import is_dynamo_compiling


def differs(got: int, wanted: int) -> bool:
    """Return whether a size is known to differ. A size that a graph does not know yet counts as equal."""
    return _known(got != wanted) if is_dynamo_compiling() else got != wanted


def exceeds(got: int, limit: int) -> bool:
    """Return whether a size is known to be larger."""
    return _known(got > limit) if is_dynamo_compiling() else got > limit


def _known(condition: bool) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
