"""Conversion of records to the rows of a timeline, and to the JSON that Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .buffer import NANOSECONDS, EventType, Recording, Track


@dataclass(frozen=True)
class Span:
    """An event with a length, or an instant without one."""

    name: str
    start: float  # ns since the first record
    end: float
    depth: int  # number of spans around it
    cut: bool = False  # its end was not recorded, so it ends with its track
    instant: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the timeline: tracks of one warpgroup on one multiprocessor that do not overlap."""

    process: int
    process_name: str
    thread: int
    name: str
    spans: list[Span]


@dataclass(frozen=True)
class Timeline:
    """The contents of a buffer, ready to be drawn."""

    rows: list[Row]
    events: int  # number of records
    dropped: int  # events that did not fit into the buffer
    unbalanced: int  # records without a matching one: begins are cut, ends are left out
    length: float  # ns


def timeline_of(recording: Recording, names: Sequence[str]) -> Timeline:
    """Return the spans of all tracks in rows sorted by multiprocessor, then by warpgroup."""
    begins = min((record.time for track in recording.tracks for record in track.records), default=0.0)
    made = [(track, *_spans(track, names, begins)) for track in recording.tracks]
    rows = _rows(recording, [(track, spans) for track, spans, _ in made])
    return Timeline(
        rows,
        sum(len(track.records) for track in recording.tracks),
        recording.dropped,
        sum(wrong for _, _, wrong in made),
        max((span.end for _, spans, _ in made for span in spans), default=0.0),
    )


def _spans(track: Track, names: Sequence[str], begins: float) -> tuple[list[Span], int]:
    """Return the spans of a track in the order of their starts, and the number of unmatched records."""
    found: list[tuple[int, Span]] = []  # with the number of the record that began each
    open_spans: list[tuple[int, int, float]] = []  # number, event, start
    wrong = 0
    for number, record in enumerate(track.records):
        time = record.time - begins
        if record.kind == EventType.kBegin:
            open_spans.append((number, record.event, time))
        elif record.kind == EventType.kInstant:
            name = name_of(record.event, names)
            found.append((number, Span(name, time, time, len(open_spans), instant=True)))
        elif record.kind == EventType.kEnd and any(event == record.event for _, event, _ in open_spans):
            while True:  # events inside that never ended end here
                began, event, start = open_spans.pop()
                cut = event != record.event
                found.append((began, Span(name_of(event, names), start, time, len(open_spans), cut)))
                wrong += cut
                if not cut:
                    break
        else:
            wrong += 1
    if open_spans:
        last = track.records[-1].time if track.end is None else max(track.end, track.records[-1].time)
        for depth, (began, event, start) in enumerate(open_spans):
            found.append((began, Span(name_of(event, names), start, last - begins, depth, cut=True)))
        wrong += len(open_spans)
    return [span for _, span in sorted(found, key=lambda one: one[0])], wrong


def name_of(event: int, names: Sequence[str]) -> str:
    """Return the caller's name of an event, or its number if it has none."""
    return names[event] if event < len(names) else f"event {event}"


def _rows(recording: Recording, tracks: list[tuple[Track, list[Span]]]) -> list[Row]:
    """Assign each track to the first row of its multiprocessor and warpgroup that is free when it begins."""
    lanes: dict[tuple[int, int], list[list[Span]]] = {}
    for track, spans in sorted(tracks, key=lambda one: one[1][0].start if one[1] else 0.0):
        if not spans:
            continue
        processor = track.block if track.processor is None else track.processor
        free = lanes.setdefault((processor, track.group), [])
        begins = spans[0].start
        lane = next((lane for lane in free if max(span.end for span in lane[-len(spans) :]) <= begins), None)
        if lane is None or recording.clock == 0:
            free.append(list(spans))
        else:
            lane.extend(spans)
    rows = []
    for (processor, group), found in sorted(lanes.items()):
        for number, spans in enumerate(found):
            process, process_name, name = _names(recording, processor, group)
            thread = processor if recording.clock == NANOSECONDS else group + number * recording.groups
            rows.append(Row(process, process_name, thread, name + (f", {number + 1}" if number else ""), spans))
    return rows


def _names(recording: Recording, processor: int, group: int) -> tuple[int, str, str]:
    if recording.clock == NANOSECONDS:
        return 0, "CPU", f"worker {processor}"
    what = "SM" if recording.clock else "block"
    return processor, f"{what} {processor}", f"warpgroup {group}"


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Return the trace in Chrome's format, in microseconds, with properly nested begins and ends."""
    events: list[dict[str, Any]] = []
    for process, name in {row.process: row.process_name for row in timeline.rows}.items():
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
        )
    for row in timeline.rows:
        track = {"pid": row.process, "tid": row.thread}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": row.name}})
        events.extend({**event, **track} for event in _events(row.spans))
    counts = {"events": timeline.events, "dropped": timeline.dropped, "unbalanced": timeline.unbalanced}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": counts}


def _events(spans: list[Span]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    open_spans: list[Span] = []

    def close(until: int) -> None:
        while len(open_spans) > until:
            found.append({"ph": "E", "name": open_spans[-1].name, "ts": _microseconds(open_spans.pop().end)})

    for span in spans:
        close(span.depth)
        if span.instant:
            found.append({"ph": "i", "s": "t", "name": span.name, "ts": _microseconds(span.start)})
            continue
        begin: dict[str, Any] = {"ph": "B", "name": span.name, "ts": _microseconds(span.start)}
        found.append(begin | ({"args": {"cut": True}} if span.cut else {}))
        open_spans.append(span)
    close(0)
    return found


def _microseconds(ns: float) -> float:
    return round(ns / 1000, 4)
