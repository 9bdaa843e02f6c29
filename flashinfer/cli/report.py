"""Page of ``build_aot.py --report``: a timeline of the build in one file that needs no network."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..jit.history import Timeline, Unit, memory
from ..jit.machine.workspace import write_atomically
from ..jit.resolve import Outcome
from .table import size

SLOWEST = 20  # units in the table of the slowest


def write_report(file: Path, outcomes: Sequence[Outcome], wall: float) -> None:
    """Write the page. ``wall``: seconds that the whole build took.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(file, render(outcomes, wall).encode())
    file.chmod(0o644)


def render(outcomes: Sequence[Outcome], wall: float) -> str:
    """Return the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    timeline = merged(outcome.timeline for outcome in outcomes if outcome.timeline is not None)
    environment = Environment(
        loader=PackageLoader("flashinfer.cli", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {"size": size, "seconds": seconds, "file": _file}
    units = [unit for unit in timeline.units if unit.kind in ("compile", "link")]
    slowest = sorted(units, key=lambda unit: unit.start - unit.end)[:SLOWEST]
    modules = [_module(outcome) for outcome in sorted(outcomes, key=lambda one: one.request.spec.name)]
    return environment.get_template("report.html.jinja").render(
        title=f"{len(modules)} module{'s' * (len(modules) != 1)} of flashinfer",
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(timeline.began)) if timeline.began else "",
        timeline=timeline,
        tools=_tools(outcomes),
        facts=_facts(modules, timeline, units, wall),
        slowest=slowest,
        longest=max((unit.end - unit.start for unit in units), default=1.0) or 1.0,
        modules=modules,
        largest=max((module["size"] for module in modules), default=1) or 1,
        data=_script(_data(timeline)),
    )


def merged(timelines: Iterable[Timeline]) -> Timeline:
    """Merge all runs of a build into one timeline that begins with the first run."""
    runs = sorted({id(one): one for one in timelines}.values(), key=lambda one: one.began)
    if not runs:
        return Timeline(0.0, "", 0, 0)
    units: dict[Unit, None] = {}  # runs may share units
    for run in runs:
        units |= dict.fromkeys(run.units)
    return replace(runs[0], units=list(units))


def _module(outcome: Outcome) -> dict[str, Any]:
    spec, artifact = outcome.request.spec, outcome.artifact
    return {
        "name": spec.name,
        "archs": " ".join(outcome.request.archs),
        "how": outcome.how,
        "why": outcome.error.reason if outcome.error is not None else "",
        "size": artifact.manifest["size"] if artifact is not None else 0,
        "seconds": artifact.manifest["seconds"] if artifact is not None else 0.0,
    }


def _tools(outcomes: Sequence[Outcome]) -> list[str]:
    found: dict[str, None] = {}
    for identity in (one.request.identity for one in outcomes):
        found |= {f"{tool} {identity[tool]}": None for tool in ("cxx", "nvcc") if identity.get(tool)}
    return list(found)


def _facts(
    modules: list[dict[str, Any]], timeline: Timeline, units: list[Unit], wall: float
) -> list[tuple[str, str, str]]:
    """Return ``(name, value, explanation)`` of each number at the head of the page."""
    count = {how: sum(module["how"] == how for module in modules) for how in ("built", "reused", "failed")}
    work = sum(unit.end - unit.start for unit in units)
    resumed = sum(unit.kind == "reuse" for unit in timeline.units)
    waited = sum(unit.end - unit.start for unit in timeline.units if unit.kind == "wait")
    spared = sum(module["seconds"] for module in modules if module["how"] == "reused")
    facts = [
        (
            "modules",
            str(len(modules)),
            ", ".join(f"{number} {how}" for how, number in count.items() if number) or "none",
        ),
        ("wall time", seconds(wall), f"{seconds(work)} of compiling, {work / wall if wall else 0:.1f} at once"),
        (
            "reused",
            f"{count['reused'] / len(modules):.0%}" if modules else "",
            f"{seconds(spared)} of compiling saved" if spared else "nothing was reused",
        ),
        ("size", size(sum(module["size"] for module in modules)), "of all libraries"),
        ("memory", size(max((at_once for _, at_once in memory(units)), default=0)), "of compilers at once, at most"),
    ]
    if resumed:
        facts.append(("resumed", str(resumed), "objects of an interrupted build"))
    if waited >= 0.05:
        facts.append(("waiting", seconds(waited), "for compile slots and other builds"))
    return facts


def _file(unit: Unit) -> str:
    return unit.name if unit.kind == "link" else unit.source.rpartition("/")[2]


def seconds(length: float) -> str:
    """Format a time in the unit that makes it short."""
    if length < 1:
        return f"{length * 1000:.0f} ms"
    if length < 100:
        return f"{length:.1f} s"
    return f"{length // 60:.0f} min {length % 60:.0f} s"


def _data(timeline: Timeline) -> dict[str, Any]:
    """Return the data of the page's script: units with their rows, and memory over time."""
    shown = [(unit, unit.lane) for unit in timeline.units if unit.kind != "wait"]
    slots = sorted({lane for _, lane in shown})
    placed = [(unit, slots.index(lane)) for unit, lane in shown]
    waits = rows(unit for unit in timeline.units if unit.kind == "wait")
    placed += [(unit, len(slots) + row) for unit, row in waits]
    names = [f"slot {lane}" for lane in slots] + ["waiting"] * len({row for _, row in waits})
    begins = min((unit.start for unit, _ in placed), default=0.0)
    return {
        "begins": begins,
        "ends": max((unit.end for unit, _ in placed), default=0.0),
        "rows": names,
        "units": [{**asdict(unit), "row": row} for unit, row in placed],
        "memory": memory(timeline.units),
    }


def rows(units: Iterable[Unit]) -> list[tuple[Unit, int]]:
    """Assign each unit the first row that is free while it runs."""
    ends: list[float] = []
    result = []
    for unit in sorted(units, key=lambda unit: unit.start):
        row = next((number for number, end in enumerate(ends) if end <= unit.start), len(ends))
        ends[row:] = [unit.end, *ends[row + 1 :]]
        result.append((unit, row))
    return result


def _script(data: Any) -> str:
    """Return JSON for a script element. Nothing in it can end the element."""
    return json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
