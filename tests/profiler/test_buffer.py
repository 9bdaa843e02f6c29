"""Hand-made buffers: their records and their traces."""

from __future__ import annotations

import json
import logging
import random
from itertools import pairwise

import pytest
import torch

from flashinfer import profiler
from flashinfer._profiler.buffer import CYCLES, NANOSECONDS, read

BEGIN, END, INSTANT, TURN = profiler.EventType
NAMES = ["load", "compute", "store"]


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def buffer_of(
    tracks: list[tuple[tuple[int, int, int], tuple[int, int], list[tuple[int, int, int]]]],
    *,
    groups: int = 1,
    clock: int = NANOSECONDS,
    room: int | None = None,
) -> torch.Tensor:
    """Return a buffer as a kernel writes it.

    A track has ``(place, clock, ns)`` of its start, ``(clock, ns)`` of its end, and ``(kind, event, clock)``
    of its events.
    """
    most = max(len(events) for _, _, events in tracks) if room is None else room
    words = torch.full((1 + len(tracks) * (4 + most),), 0x55AA, dtype=torch.int64)
    words[0] = signed(len(tracks) // groups | groups << 32 | clock << 48)
    for t, ((place, first, start), (last, end), events) in enumerate(tracks):
        count = len(events) + sum(kind == TURN for kind, _, _ in events)
        track = [place | first << 32, start, count | last << 32, end]
        track += [kind | event << 2 | t << 12 | (at & 0xFFFFFFFF) << 32 for kind, event, at in events[:most]]
        for n, word in enumerate(track):
            words[1 + n * len(tracks) + t] = signed(word)
    return words.view(torch.uint64)


def trace_of(buffer: torch.Tensor, tmp_path, names=NAMES) -> dict:
    profiler.export_to_perfetto_trace(buffer, names, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())


def test_nanoseconds_become_exact_json(tmp_path):
    one = ((0, 5000, 5000), (9000, 9000), [(BEGIN, 1, 5000), (BEGIN, 0, 6000), (END, 0, 6500), (END, 1, 8000)])
    two = ((1, 5000, 5000), (7000, 7000), [(BEGIN, 2, 5500), (INSTANT, 0, 5600), (END, 2, 5750)])
    idle = ((0, 0, 0), (0, 0), [])
    trace = trace_of(buffer_of([one, two, idle]), tmp_path)
    place, other = {"pid": 0, "tid": 0}, {"pid": 0, "tid": 1}
    assert trace == {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "CPU"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "thread_name", **place, "args": {"name": "worker 0"}},
            {"ph": "B", "name": "compute", "ts": 0.0, **place},
            {"ph": "B", "name": "load", "ts": 1.0, **place},
            {"ph": "E", "name": "load", "ts": 1.5, **place},
            {"ph": "E", "name": "compute", "ts": 3.0, **place},
            {"ph": "M", "name": "thread_name", **other, "args": {"name": "worker 1"}},
            {"ph": "B", "name": "store", "ts": 0.5, **other},
            {"ph": "i", "s": "t", "name": "load", "ts": 0.6, **other},
            {"ph": "E", "name": "store", "ts": 0.75, **other},
        ],
        "displayTimeUnit": "ns",
        "otherData": {"events": 7, "dropped": 0, "unbalanced": 0},
    }


def test_cycles_become_nanoseconds_by_the_ends_of_all_tracks():
    """A cycle is half a nanosecond. The timer ticks by 32, and clocks of multiprocessors wrap at 2^32.

    The timer counts from 1970, where float64 has steps of 256 ns. Nevertheless the time between two events is
    exact.
    """
    start = 1_800_000_000_000_000_000
    tracks, wanted = [], []
    for sm in range(8):
        zero = random.choice([random.randrange(1 << 32), (1 << 32) - 500])
        length = random.randrange(100_000, 200_000)
        times = sorted(random.randrange(length) for _ in range(6))
        ticks = [(start + ns) // 32 * 32 for ns in (0, length // 2)]
        events = [(n % 2, n // 2, zero + at) for n, at in enumerate(times)]
        ends = (zero + length) % (1 << 32), ticks[1]
        tracks.append(((sm, zero, ticks[0]), ends, events))
        wanted.append([at / 2 for at in times])
    recording = read(buffer_of(tracks, groups=2, clock=CYCLES))
    assert (recording.blocks, recording.groups) == (4, 2)
    assert [track.processor for track in recording.tracks] == list(range(8))
    assert [(track.block, track.group) for track in recording.tracks] == [(n // 2, n % 2) for n in range(8)]
    for track, times in zip(recording.tracks, wanted, strict=True):
        got = [record.time for record in track.records]
        assert got == sorted(got)
        assert max(abs(a - b) for a, b in zip(got, times, strict=True)) < 64
        assert [b - a for a, b in pairwise(got)] == pytest.approx(
            [b - a for a, b in pairwise(times)], rel=2e-3, abs=1e-3
        )


def test_blocks_that_follow_each_other_share_a_row(tmp_path):
    """Two CTAs run one after the other on a multiprocessor, and one at the same time."""
    spans = [(0, 10), (12, 20), (5, 30)]
    tracks = [((7, a, a), (b, b), [(BEGIN, 0, a), (END, 0, b)]) for a, b in spans]
    trace = trace_of(buffer_of(tracks, clock=CYCLES), tmp_path)
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {0: "warpgroup 0", 1: "warpgroup 0, 2"}
    assert [e["tid"] for e in trace["traceEvents"] if e["ph"] == "B"] == [0, 0, 1]
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {"SM 7"}


def test_dropped_and_unmatched_records_are_counted(tmp_path, caplog):
    events = [(END, 2, 10), (BEGIN, 0, 20), (BEGIN, 1, 30), (END, 0, 40), (BEGIN, 1, 50), (END, 1, 60), (END, 1, 70)]
    with caplog.at_level(logging.WARNING, "flashinfer"):
        trace = trace_of(buffer_of([((0, 5, 5), (90, 90), events)], room=5), tmp_path)
    assert trace["otherData"] == {"events": 5, "dropped": 2, "unbalanced": 3}
    assert "2 events were dropped for which it had no room, 3 records have no other half" in caplog.text
    found = [(e["ph"], e["name"], e["ts"], e.get("args")) for e in trace["traceEvents"] if e["ph"] in "BE"]
    assert found == [
        ("B", "load", 0.01, None),
        ("B", "compute", 0.02, {"cut": True}),
        ("E", "compute", 0.03, None),
        ("E", "load", 0.03, None),
        ("B", "compute", 0.04, {"cut": True}),
        ("E", "compute", 0.08, None),
    ]


def test_switch_to_ends_the_last_event_and_begins_another(tmp_path):
    """A turn may be inside another event. Without an open event, its end is counted as unmatched."""
    events = [(BEGIN, 0, 10), (BEGIN, 1, 20), (TURN, 2, 30), (TURN, 1, 45), (END, 1, 50), (END, 0, 60), (TURN, 2, 70)]
    trace = trace_of(buffer_of([((0, 5, 5), (90, 90), [*events, (END, 2, 80)])]), tmp_path)
    found = [(e["ph"], e["name"], round(e["ts"] * 1000)) for e in trace["traceEvents"] if e["ph"] in "BE"]
    assert found == [
        ("B", "load", 0), ("B", "compute", 10), ("E", "compute", 20), ("B", "store", 20), ("E", "store", 35),
        ("B", "compute", 35), ("E", "compute", 40), ("E", "load", 50), ("B", "store", 60), ("E", "store", 70),
    ]  # fmt: skip
    assert trace["otherData"] == {"events": 11, "dropped": 0, "unbalanced": 1}
    for room in range(len(events) + 1):
        recording = read(buffer_of([((0, 5, 5), (90, 90), [*events, (END, 2, 80)])], room=room))
        assert len(recording.tracks[0].records) == (0, 1, 2, 4, 6, 7, 8, 10)[room]
        assert len(recording.tracks[0].records) + recording.dropped == 11


def test_a_buffer_without_room_for_any_event_says_so(tmp_path, caplog):
    buffer = torch.zeros(64, dtype=torch.int64)
    buffer[0] = 132 | 3 << 32 | CYCLES << 48
    with caplog.at_level(logging.WARNING, "flashinfer"):
        trace = trace_of(buffer, tmp_path)
    assert trace["traceEvents"] == []
    assert "got 64 words, wanted more than 1585 for the 396 tracks of this kernel" in caplog.text


def test_buffers_of_flashinfer(tmp_path):
    """Tags and words of FlashInfer 0.2.7: nanoseconds that wrap at 2^32, and zeros at the end of a track."""
    blocks, groups, size = 3, 2, 40
    words = [0] * size
    words[0] = blocks | groups << 32
    for track in range(blocks * groups):
        for n in range(4):
            tag = track << 12 | (n // 2) << 2 | n % 2
            time = ((1 << 32) - 50 + 10 * n + 20 * track) & 0xFFFFFFFF
            words[1 + n * blocks * groups + track] = tag | time << 32
            assert profiler.decode_tag(tag, blocks, groups) == (track // groups, track % groups, n // 2, n % 2)
    buffer = torch.tensor([signed(word) for word in words]).view(torch.uint64)
    trace = trace_of(buffer, tmp_path)
    assert trace["otherData"] == {"events": 24, "dropped": 0, "unbalanced": 0}
    for track in range(blocks * groups):
        mine = {"pid": track // groups, "tid": track % groups}
        events = [e for e in trace["traceEvents"] if e["ph"] in "BE" and (e["pid"], e["tid"]) == tuple(mine.values())]
        assert [(e["name"], e["ph"]) for e in events] == [
            ("load", "B"),
            ("load", "E"),
            ("compute", "B"),
            ("compute", "E"),
        ]
        assert [e["ts"] for e in events] == [pytest.approx((10 * n + 20 * track) / 1000) for n in range(4)]


def test_events_without_a_name_have_their_number(tmp_path):
    buffer = buffer_of([((0, 5, 5), (9, 9), [(BEGIN, 700, 6), (END, 700, 7)])])
    assert [e["name"] for e in trace_of(buffer, tmp_path)["traceEvents"]][-1] == "event 700"


@pytest.mark.parametrize(
    "buffer, error, text",
    [
        (None, TypeError, "got NoneType, wanted Tensor"),
        (torch.zeros(8), TypeError, "got torch.float32, wanted torch.uint64 or torch.int64"),
        (torch.zeros(8, dtype=torch.uint64), ValueError, "got one whose first word no kernel has written"),
        (torch.zeros(0, dtype=torch.int64), ValueError, "got one whose first word no kernel has written"),
        (torch.full((8,), -1), ValueError, "got one whose first word no kernel has written"),
    ],
)
def test_bad_buffers(buffer, error, text, tmp_path):
    for export in (profiler.export_to_perfetto_trace, profiler.export_to_html):
        with pytest.raises(error, match=f"profiler_buffer: {text}"):
            export(buffer, NAMES, tmp_path / "trace")
    assert not list(tmp_path.iterdir())
