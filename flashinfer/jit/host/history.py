"""History of compile times and memory, per module and file.

It predicts durations and how many compilers fit.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import PurePath
from typing import NamedTuple

from ... import env
from ..machine.workspace import roots, write_atomically
from ..spec import Spec
from ..worker.procfs import cpu_limit

LINK = "link"  # the step that makes the library
_UNKNOWN = {".cu": 2 << 30, LINK: 256 << 20}  # bytes without a history, for steps other than the C++ compiler


class Past(NamedTuple):
    seconds: float
    peak_rss_bytes: int


def read(name: str) -> dict[str, Past]:
    """Return file (or ``LINK``) -> its last time and memory. An unreadable history is empty."""
    for root in roots():
        with suppress(OSError, ValueError, TypeError, AttributeError):
            entries = json.loads((root / "history" / f"{name}.json").read_bytes())
            return {file: Past(float(seconds), int(peak)) for file, (seconds, peak) in entries.items()}
    return {}


def remember(name: str, past: dict[str, Past]) -> None:
    """Update the history of some files. A failure to write it is no error."""
    from .lock import exclusive  # imported only here, because readers need no lock

    with suppress(OSError), exclusive(f"history {roots()[-1].resolve()}", patience=1.0):
        write_atomically(roots()[-1] / "history" / f"{name}.json", json.dumps({**read(name), **past}).encode())


def expected_memory(past: dict[str, Past], file: str) -> int:
    """Return the peak memory in bytes that compiling ``file`` is expected to need."""
    if file in past:
        return past[file].peak_rss_bytes
    return _UNKNOWN.get(PurePath(file).suffix or file, 1 << 30)


def estimate(spec: Spec) -> float | None:
    """Return the seconds of a complete build of ``spec`` on this machine when idle, or ``None``."""
    past = read(spec.name)
    if not all(file in past for file in (*spec.units(), LINK)):
        return None
    took = [past[file].seconds for file in spec.units()]
    return max(*took, sum(took) / jobs()) + past[LINK].seconds


def jobs(wanted: int | None = None) -> int:
    """Return the number of compilers at once: ``wanted`` or ``MAX_JOBS``, at most the number of CPUs."""
    return min(wanted or env.MAX_JOBS.get(), cpu_limit())
