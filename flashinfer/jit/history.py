"""Progress of builds: past times and memory of each file, the timeline of a build, and its display.

The past predicts durations and how many compilers fit. Timelines are stored in ``<workspace>/traces`` for
ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from .. import env
from .machine.workspace import roots, write_atomically
from .report import is_terminal, say, write
from .spec import Spec
from .worker import cpu_limit

LINK = "link"  # the step that makes the library
_UNKNOWN = {".cu": 2 << 30, LINK: 256 << 20}  # bytes that a step without a history needs; C++ files need 1 GiB


class Past(NamedTuple):
    """Time and peak memory of a step's last run."""

    seconds: float
    peak_rss_bytes: int


def past_of(name: str) -> dict[str, Past]:
    """Map each file, and ``LINK``, to its last time and memory. An unreadable history is empty."""
    for root in roots():
        with suppress(OSError, ValueError, TypeError, AttributeError):
            entries = json.loads((root / "history" / f"{name}.json").read_bytes())
            return {file: Past(float(seconds), int(peak)) for file, (seconds, peak) in entries.items()}
    return {}


def remember(name: str, past: dict[str, Past]) -> None:
    """Update the history of some files. A failure to write it is no error."""
    from .lock import exclusive  # imported only here, because readers need no lock

    with suppress(OSError), exclusive(f"history {roots()[-1].resolve()}", patience=1.0):
        write_atomically(roots()[-1] / "history" / f"{name}.json", json.dumps({**past_of(name), **past}).encode())


def expected_memory(past: dict[str, Past], file: str) -> int:
    """Return the peak memory in bytes that compiling ``file`` is expected to need."""
    if file in past:
        return past[file].peak_rss_bytes
    return _UNKNOWN.get(PurePath(file).suffix or file, 1 << 30)


def estimate(spec: Spec) -> float | None:
    """Return the seconds of a complete build of ``spec`` on this machine when idle, or ``None``."""
    past = past_of(spec.name)
    if not all(file in past for file in (*spec.units(), LINK)):
        return None
    durations = [past[file].seconds for file in spec.units()]
    return max(*durations, sum(durations) / compilers()) + past[LINK].seconds


def compilers(wanted: int | None = None) -> int:
    """Return the number of compilers at once: ``wanted`` or ``MAX_JOBS``, at most the number of CPUs."""
    return min(wanted or env.MAX_JOBS.get(), cpu_limit())


MAX_TRACES = 50  # older ones are removed


@dataclass(frozen=True)
class Unit:
    """One step of a build. Its times are seconds since the epoch.

    ``kind``: ``compile``, ``link``, ``reuse`` (an object of an interrupted build) or ``wait`` (for a slot, or
    another process's build). ``name`` is the output of ``source``. ``lane`` is the compile slot. For a wait, it
    is the slot that the unit got afterwards.
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
        name, duration = f"{unit.module}/{unit.name}", round((unit.end - unit.start) * 1e6)
        if unit.kind == "wait":  # waits overlap: a pair of asynchronous events needs no lane
            add("b", name, unit.start, 0, cat="wait", id=number, args=args)
            add("e", name, unit.end, 0, cat="wait", id=number)
        else:
            add("X", name, unit.start, unit.lane + 1, cat=unit.kind, dur=duration, args=args)
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


def save_timeline(timeline: Timeline, root: Path) -> None:
    """Write a timeline below the workspace and remove the oldest ones. A failure to write it is no error."""
    folder = root / "traces"
    modules = sorted({unit.module for unit in timeline.units})
    what = modules[0] if len(modules) == 1 else f"{len(modules)}-modules"
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(timeline.began))
    with suppress(OSError):
        if timeline.units:
            write_atomically(folder / f"{when}-{what}-{timeline.pid}.json", json.dumps(trace_events(timeline)).encode())
        for old in sorted(folder.glob("[!.]*.json"))[:-MAX_TRACES]:
            old.unlink(missing_ok=True)


REPORT_INTERVAL = 10.0  # seconds between lines without a terminal


@dataclass
class Progress:
    """Numbers for a display: all steps and the finished ones, the unfinished modules, and the start time."""

    total: int = 0
    done: int = 0
    left: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)


Watch = Callable[[Progress], None]


class ConsoleProgress:
    """Display of a build at run time: one changing line on a terminal, a line every 10 seconds elsewhere."""

    def __init__(self, specs: Sequence[Spec], place: str) -> None:
        durations = [estimate(spec) for spec in specs]
        # Modules share the CPUs, so the sum of their times estimates all of them.
        self.estimate = sum(filter(None, durations)) if None not in durations else None
        names = ", ".join(spec.name for spec in specs[:8]) + ", ..." * (len(specs) > 8)
        files = sum(len(spec.units()) for spec in specs)
        about = f", about {self.estimate:.0f} s" if self.estimate else ""
        say(f"building {names} ({files} source files{about}) in {place}")
        self.on_terminal, self.last = is_terminal(sys.stderr), time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        about = f" of about {self.estimate:.0f}" if self.estimate else ""
        left = ", ".join(progress.left[:4]) + ", ..." * (len(progress.left) > 4)
        text = f"{progress.done}/{progress.total} steps, {now - progress.started:.0f}{about} s: {left or 'done'}"
        if self.on_terminal:
            # The next line overwrites this one. At the end the line is cleared.
            write(f"\r\x1b[Kflashinfer: {text}" if progress.left else "\r\x1b[K")
        elif now - self.last >= REPORT_INTERVAL:
            self.last = now
            say(text)
