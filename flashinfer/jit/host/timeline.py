"""Timelines of builds, stored in ``<workspace>/traces`` for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..machine.workspace import write_atomically

KEPT = 50  # number of traces, those of the last builds


@dataclass(frozen=True)
class Unit:
    """One step of a build. Its times are seconds since the epoch.

    ``kind``: ``compile``, ``link``, ``reuse`` (an object of an interrupted build) or ``wait`` (for a slot, or
    another process's build). ``name`` is the file made of ``source``. ``lane`` is the compile slot, for a
    wait the one it led to.
    """

    kind: str
    module: str
    name: str
    source: str
    start: float
    end: float
    lane: int = 0
    peak_rss_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """One build: its start in seconds since the epoch, its host, and its units in the order of their ends."""

    began: float
    host: str
    pid: int
    jobs: int
    units: list[Unit] = field(default_factory=list)


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the Trace Event Format: slots as lanes, waits, and memory as a counter."""
    first, events = min((unit.start for unit in timeline.units), default=0.0), list[dict[str, Any]]()

    def add(ph: str, name: str, at: float, tid: int, **more: Any) -> None:
        events.append({"ph": ph, "name": name, "ts": round((at - first) * 1e6), "pid": 1, "tid": tid, **more})

    add("M", "process_name", first, 0, args={"name": f"build on {timeline.host} by process {timeline.pid}"})
    for lane in sorted({unit.lane for unit in timeline.units if unit.kind != "wait"}):
        add("M", "thread_name", first, lane + 1, args={"name": f"slot {lane}"})
    for number, unit in enumerate(timeline.units):
        args = {"module": unit.module, "source": unit.source, "peak MiB": unit.peak_rss_bytes >> 20}
        name, took = f"{unit.module}/{unit.name}", round((unit.end - unit.start) * 1e6)
        if unit.kind == "wait":  # waits overlap: a pair of asynchronous events needs no lane
            add("b", name, unit.start, 0, cat="wait", id=number, args=args)
            add("e", name, unit.end, 0, cat="wait", id=number)
        else:
            add("X", name, unit.start, unit.lane + 1, cat=unit.kind, dur=took, args=args)
    for at, size in memory(timeline.units):
        add("C", "memory, at most", at, 0, args={"MiB": size >> 20})
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(first))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": began, "jobs": timeline.jobs}}


def memory(units: Iterable[Unit]) -> list[tuple[float, int]]:
    """Return ``(time, bytes)`` at every change: the sum of the peaks of all running units, an upper bound."""
    alive = [unit for unit in units if unit.kind in ("compile", "link")]
    starts = [(unit.start, unit.peak_rss_bytes) for unit in alive]
    ends = [(unit.end, -unit.peak_rss_bytes) for unit in alive]
    changes = sorted(starts + ends)
    totals = accumulate(size for _, size in changes)
    return list(dict(zip((at for at, _ in changes), totals, strict=True)).items())


def keep(timeline: Timeline, root: Path) -> None:
    """Write a timeline below the workspace and remove the oldest ones. A failure to write it is no error."""
    folder = root / "traces"
    modules = sorted({unit.module for unit in timeline.units})
    what = modules[0] if len(modules) == 1 else f"{len(modules)}-modules"
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(timeline.began))
    with suppress(OSError):
        if timeline.units:
            write_atomically(folder / f"{when}-{what}-{timeline.pid}.json", json.dumps(trace_events(timeline)).encode())
        for old in sorted(folder.glob("[!.]*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
