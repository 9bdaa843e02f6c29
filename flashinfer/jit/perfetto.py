"""Timelines as ui.perfetto.dev and chrome://tracing read them (Trace Event Format), kept in ``<workspace>/traces``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .timeline import Timeline, Unit
from .workspace import write_atomically

KEPT = 50  # traces of the last builds


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Compile slots and waits as lanes with their units, and the memory of the compilers that run as a counter."""
    first = min((unit.start for unit in timeline.units), default=0.0)
    lanes = [("slot", unit, unit.lane) for unit in timeline.units if unit.kind != "wait"]
    lanes += [("waiting", unit, lane) for unit, lane in rows(unit for unit in timeline.units if unit.kind == "wait")]
    numbers = {lane: number for number, lane in enumerate(sorted({(what, lane) for what, _, lane in lanes}), 1)}
    names = {0: f"build on {timeline.host} by process {timeline.pid}"}
    names |= {number: f"{what} {lane}" for (what, lane), number in numbers.items()}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name" if tid else "process_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in names.items()
    ]
    for what, unit, lane in lanes:
        told = {"module": unit.module, "source": unit.source, "peak MiB": unit.peak_rss_bytes >> 20}
        event = {"ph": "X", "name": f"{unit.module}/{unit.name}", "cat": unit.kind, "pid": 1, "args": told}
        events.append(
            event | {"tid": numbers[what, lane], "ts": _us(unit.start - first), "dur": _us(unit.end - unit.start)}
        )
    for at, size in memory(timeline.units):
        counter = {"ph": "C", "name": "memory, at most", "pid": 1, "tid": 0, "args": {"MiB": size >> 20}}
        events.append(counter | {"ts": _us(at - first)})
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timeline.began + first))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": began, "jobs": timeline.jobs}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def rows(units: Iterable[Unit]) -> list[tuple[Unit, int]]:
    """Each unit with the first row that is free while it runs."""
    ends: list[float] = []
    result = []
    for unit in sorted(units, key=lambda unit: unit.start):
        row = next((number for number, end in enumerate(ends) if end <= unit.start), len(ends))
        ends[row:] = [unit.end, *ends[row + 1 :]]
        result.append((unit, row))
    return result


def memory(units: Iterable[Unit]) -> list[tuple[float, int]]:
    """``(time, bytes)`` at every change: the peaks of all units that run, which is no less than what they hold."""
    alive = [unit for unit in units if unit.kind in ("compile", "link")]
    changes = sorted(
        [(unit.start, unit.peak_rss_bytes) for unit in alive] + [(unit.end, -unit.peak_rss_bytes) for unit in alive]
    )
    total, result = 0, dict[float, int]()
    for at, change in changes:
        total += change
        result[at] = total
    return list(result.items())


def keep(timeline: Timeline, root: Path) -> None:
    """Write a timeline below the workspace; of many, the oldest go. Not being able to is no error."""
    folder = root / "traces"
    modules = sorted({unit.module for unit in timeline.units})
    what = modules[0] if len(modules) == 1 else f"{len(modules)}-modules"
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(timeline.began))
    with suppress(OSError):
        if timeline.units:
            write_atomically(folder / f"{when}-{what}-{timeline.pid}.json", json.dumps(trace_events(timeline)).encode())
        for old in sorted(folder.glob("[!.]*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
