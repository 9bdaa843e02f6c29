"""Size of a test run: CI runs every case, a local run leaves out those that are marked ``slow``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest

IN_CI = bool(os.environ.get("FLASHINFER_TEST_EXAMPLES"))


def few(values: Iterable[str], count: int = 1) -> list[str]:
    """Return all of ``values`` in CI, and the same ``count`` of them in every local run."""
    every = sorted(values)
    return every if IN_CI else every[:count]


def mark_beyond(items: list[pytest.Item]) -> None:
    """Mark all cases of a ``slow_beyond(count)`` test but ``count`` as slow, next to those that are marked already.

    The test's name seeds the choice, so every run makes the same one. A choice of every n-th case would keep
    one value of an inner parameter.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow_beyond") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, every in cases.items():
        (count,) = every[0].get_closest_marker("slow_beyond").args  # type: ignore[union-attr]
        for item in random.Random(name).sample(every, max(0, len(every) - count)):
            item.add_marker("slow")
