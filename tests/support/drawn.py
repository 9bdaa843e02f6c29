"""How much a run tries: everything in CI, and on a desk what ten minutes have room for, another part in each run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

IN_CI = bool(os.environ.get("FLASHINFER_TEST_EXAMPLES"))


def some(values: Iterable[str], count: int = 1) -> list[str]:
    """All of ``values``, in order, in CI; on a desk ``count`` of them, drawn by the test's seed."""
    every = sorted(values)
    return every if IN_CI else sorted(random.sample(every, count))
