"""The history holds what compiling took, per module and file: for estimates, and for how many fit into the memory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import PurePath
from typing import NamedTuple

from ... import env
from ..machine.workspace import roots, write_atomically
from ..spec import Spec
from ..worker.procfs import cpu_limit

LINK = "link"  # stands for the step that makes the library
_UNKNOWN = {".cu": 2 << 30, LINK: 256 << 20}  # bytes where there is no history, of others than a C++ compiler


class Past(NamedTuple):
    seconds: float
    peak_rss_bytes: int


def read(name: str) -> dict[str, Past]:
    """File as the spec names it (or ``LINK``) -> what it took. Unreadable is no history."""
    for root in roots():
        with suppress(OSError, ValueError, TypeError, AttributeError):
            entries = json.loads((root / "history" / f"{name}.json").read_bytes())
            return {file: Past(float(seconds), int(peak)) for file, (seconds, peak) in entries.items()}
    return {}


def remember(name: str, past: dict[str, Past]) -> None:
    """Keep what files took now, and of other files what they took before. Not being able to is no error."""
    from .lock import alone  # where something was built; whoever only reads needs no locks

    with suppress(OSError), alone(f"history {roots()[-1].resolve()}", patience=1.0):
        write_atomically(roots()[-1] / "history" / f"{name}.json", json.dumps({**read(name), **past}).encode())


def expected_memory(past: dict[str, Past], file: str) -> int:
    """Bytes that compiling ``file`` will need at most, as far as is known."""
    if file in past:
        return past[file].peak_rss_bytes
    return _UNKNOWN.get(PurePath(file).suffix or file, 1 << 30)


def estimate(spec: Spec) -> float | None:
    """Seconds that building ``spec`` from nothing will take on this machine when it is idle, or ``None``."""
    past = read(spec.name)
    if not all(file in past for file in (*spec.units(), LINK)):
        return None
    took = [past[file].seconds for file in spec.units()]
    return max(*took, sum(took) / jobs()) + past[LINK].seconds


def jobs(asked: int | None = None) -> int:
    """Compilers that may be alive at once: ``asked`` or ``MAX_JOBS``, and no more than there are CPUs."""
    return min(asked or env.MAX_JOBS.get(), cpu_limit())
