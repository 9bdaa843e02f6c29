"""Timeline as a page: one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .trace import Row, Timeline

MOST_SPANS = 200_000  # that a browser draws without a pause. The first spans of each row are shown.


def render(timeline: Timeline, title: str) -> str:
    """Return the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flashinfer._profiler", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    shown = _shown(timeline.rows)
    totals = _totals(timeline.rows)
    return environment.get_template("page.html.jinja").render(
        title=title,
        facts=_facts(timeline, shown),
        totals=totals,
        longest=max((total["sum"] for total in totals), default=1.0) or 1.0,
        rows=len(timeline.rows),
        data=_script(_data(timeline, shown)),
    )


def duration(ns: float) -> str:
    """Format a time in the unit that makes it short."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 999.5 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def _shown(rows: list[Row]) -> int:
    """Return the number of spans that are drawn per row."""
    return MOST_SPANS // max(len(rows), 1)


def _facts(timeline: Timeline, shown: int) -> list[tuple[str, str, str]]:
    """Return ``(name, value, explanation)`` of each number at the head of the page."""
    places = len({row.process for row in timeline.rows})
    hidden = sum(max(0, len(row.spans) - shown) for row in timeline.rows)
    facts = [
        ("time", duration(timeline.length), "from the first event to the last"),
        ("rows", str(len(timeline.rows)), f"of {places} {'place' if places == 1 else 'places'}"),
        ("events", str(timeline.events), f"{hidden} spans are not drawn" if hidden else "all are drawn"),
    ]
    if timeline.dropped or timeline.unbalanced:
        facts.append(("dropped", str(timeline.dropped), f"{timeline.unbalanced} records have no other half"))
    return facts


def _totals(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return count, sum, mean and maximum of each event's time, which includes the events inside it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for span in row.spans:
            if not span.instant:
                found.setdefault(span.name, []).append(span.end - span.start)
    return sorted(
        (
            {
                "name": name, "count": len(times), "sum": sum(times), "text": duration(sum(times)),
                "mean": duration(sum(times) / len(times)), "most": duration(max(times)),
            }
            for name, times in found.items()
        ),
        key=lambda total: -total["sum"],
    )  # fmt: skip


def _data(timeline: Timeline, shown: int) -> dict[str, Any]:
    """Return the data of the page's script.

    A span is name, start, length, depth, and 1 (cut), 2 (instant) or 0.
    """
    names = sorted({span.name for row in timeline.rows for span in row.spans})
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "names": names,
        "length": timeline.length,
        "rows": [
            {
                "place": row.process_name,
                "name": row.name,
                "depth": 1 + max(span.depth for span in row.spans),
                "spans": [
                    [
                        numbers[span.name], round(span.start, 1), round(span.end - span.start, 1), span.depth,
                        2 if span.instant else int(span.cut),
                    ]
                    for span in row.spans[:shown]
                ],
            }
            for row in timeline.rows
        ],
    }  # fmt: skip


def _script(data: Any) -> str:
    """Return JSON for a script element. Nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
