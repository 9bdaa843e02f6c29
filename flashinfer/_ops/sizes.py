"""Comparisons of sizes that a graph of ``torch.compile`` may know nothing of before it runs."""

from __future__ import annotations

from torch.compiler import is_dynamo_compiling


def differs(got: int, wanted: int) -> bool:
    """Whether a size is another one, so far as is known: of some a graph knows nothing before it runs."""
    return _known(got != wanted) if is_dynamo_compiling() else got != wanted


def exceeds(got: int, limit: int) -> bool:
    """Whether a size is larger, so far as is known."""
    return _known(got > limit) if is_dynamo_compiling() else got > limit


def _known(condition: bool) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
