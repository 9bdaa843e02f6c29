"""Size of a test run: all cases in CI, and locally those that fit into ten minutes, drawn in each run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

IN_CI = bool(os.environ.get("FLASHINFER_TEST_EXAMPLES"))


def some(values: Iterable[str], count: int = 1) -> list[str]:
    """Return all of ``values`` in CI, and ``count`` of them drawn by the test's seed in a local run."""
    every = sorted(values)
    return every if IN_CI else sorted(random.sample(every, count))
