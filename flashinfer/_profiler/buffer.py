"""The buffer that kernels write events to. include/flashinfer/common/profiler.h defines its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .._ops.arguments import check_none, check_present
from .._ops.codes import Code
from .._ops.numbers import check_range
from .._ops.shapes import check_tensors
from .._ops.tensors import check_device, check_vector

# Names of the events of this library's kernels, indexed by event number.
EVENT_NAMES = (
    "item", "load-q", "load-kv", "wait-q", "wait-k", "wait-v", "wait-max", "wait-p", "pack-kv", "gemm-qk", "softmax",
    "gemm-pv", "attend", "write-o",
)  # fmt: skip
# Units of clocks. Buffers of FlashInfer 0.2.7 have 0, and nanoseconds.
CYCLES, NANOSECONDS = 1, 2
TRACK_WORDS = 4  # words of a track before its events
_WORDS = (torch.uint64, torch.int64)
_LOW = 0xFFFFFFFF
_MOST_WORDS = 0x7FFFFFFF  # words of a buffer that kernels use


class EventType(Code):
    """The type of an event.

    ``kTurn`` stands for two records: the innermost event ends, and this one begins.
    """

    kBegin = 0
    kEnd = 1
    kInstant = 2
    kTurn = 3


@dataclass(frozen=True)
class Record:
    """One record of a track."""

    kind: int  # an EventType other than kTurn, which is read as an end and a begin
    event: int
    time: float  # ns since the first track of the recording began


@dataclass(frozen=True)
class Track:
    """Records of one warpgroup of a CTA, or of one worker of a CPU."""

    block: int
    group: int
    processor: int | None  # the multiprocessor or the worker, or None if the buffer has neither
    records: list[Record]
    dropped: int  # records that did not fit into the buffer
    end: float | None  # time at which the track ended


@dataclass(frozen=True)
class Recording:
    """The contents of a buffer."""

    blocks: int
    groups: int
    clock: int  # CYCLES, NANOSECONDS or 0
    tracks: list[Track] = field(default_factory=list)  # those with events
    has_room: bool = True  # the buffer is large enough for at least one event

    @property
    def dropped(self) -> int:
        return sum(track.dropped for track in self.tracks)


@dataclass
class Attached:
    """The buffer that :func:`flashinfer.profiler.attach` set for a wrapper.

    Runs without their own buffer use it.
    """

    attached: torch.Tensor | None = None

    def buffer_of_run(self, buffer: torch.Tensor | None, profiler: bool) -> torch.Tensor | None:
        """Return the buffer of a run, for kernels with or without events."""
        return self.attached if buffer is None and profiler else buffer


def checked_buffer(
    op: str, buffer: torch.Tensor | None, profiler: bool, device: torch.device
) -> tuple[torch.Tensor] | tuple[()]:
    """Return the buffer of a run as an operator takes it, or nothing if the kernels write no events.

    Raises:
        ValueError: the buffer is missing, not expected, on another device or not a contiguous row of words.
        TypeError: it is not a tensor, or has another dtype.
    """
    if not profiler:
        why = "plan() was called without use_profiler, for kernels that write no events"
        check_none(op, "profiler_buffer", buffer, why)
        return ()
    check_present(op, "profiler_buffer", buffer, "one: plan() was called with use_profiler")
    buffer = check_vector(op, "profiler_buffer", buffer, *_WORDS)
    check_range(op, "profiler_buffer", buffer.numel(), 1, unit="words")
    check_device(op, "profiler_buffer", buffer, device)
    return (buffer.view(torch.int64),)


def decode_tag(tag: int, num_blocks: int, num_groups: int) -> tuple[int, int, int, int]:
    """Return block, group, event and :class:`EventType` of a record's low half.

    Args:
        tag: 32 bits of FlashInfer 0.2.7's kernels. Tags of this library have no block and group, because a
            record's position in the buffer implies them. Their type may be :attr:`EventType.kTurn`.
        num_blocks, num_groups: of the kernel, from the buffer's first word.
    """
    track = tag >> 12 & 0xFFFFF
    return track // num_groups % max(num_blocks, 1), track % num_groups, tag >> 2 & 0x3FF, tag & 3


def read(profiler_buffer: torch.Tensor) -> Recording:
    """Read a buffer that a kernel of this library or of FlashInfer 0.2.7 wrote.

    Raises:
        TypeError: it is not a tensor of 64-bit integers.
        ValueError: no kernel wrote to it.
    """
    check_tensors("read", profiler_buffer=(profiler_buffer, None, _WORDS))
    near = profiler_buffer.detach().reshape(-1).view(torch.int64).cpu()
    first = int(near[0]) & 0xFFFFFFFFFFFFFFFF if near.numel() else 0
    blocks, groups = first & _LOW, first >> 32 & 0xFFFF
    clock = first >> 48
    if not blocks or not groups or clock > NANOSECONDS:
        raise ValueError("profiler_buffer: got one whose first word no kernel has written, wanted that of a run")
    tracks = blocks * groups
    each = (min(near.numel(), _MOST_WORDS) - 1) // tracks
    if clock == 0:
        return Recording(blocks, groups, clock, list(_read_flashinfer(near, tracks, groups)))
    if each < TRACK_WORDS:
        return Recording(blocks, groups, clock, has_room=False)
    words = near[1 : 1 + each * tracks].view(each, tracks)
    heads = words[:TRACK_WORDS].T.tolist()
    # Times are relative to the first start. GPUs count from 1970, where a float64 has steps of 256 ns.
    began = min((head[1] for head in heads if head[2] & _LOW), default=0)
    heads = [[head[0], head[1] - began, head[2], head[3] - began] for head in heads]
    rate = _rate(heads) if clock == CYCLES else 1.0
    found = [_read_track(words, number, groups, head, rate) for number, head in enumerate(heads) if head[2] & _LOW]
    return Recording(blocks, groups, clock, found)


def _rate(heads: Sequence[Sequence[int]]) -> float:
    """Return nanoseconds per cycle over all tracks: one track may be shorter than a tick of the timer."""
    done = [head for head in heads if head[2] & _LOW]
    cycles = sum((head[2] >> 32) - (head[0] >> 32) & _LOW for head in done)
    return sum(head[3] - head[1] for head in done) / cycles if cycles else 1.0


def _read_track(words: torch.Tensor, number: int, groups: int, head: Sequence[int], rate: float) -> Track:
    processor, start = head[0] & _LOW, head[0] >> 32 & _LOW
    count = head[2] & _LOW
    length = (head[2] >> 32) - start & _LOW
    # The mean of both ends fixes the middle of the track. One end is off by up to a tick of the timer.
    origin = (head[1] + head[3]) / 2 - length * rate / 2
    records, began = list[Record](), list[int]()
    at, before = 0, start
    for word in words[TRACK_WORDS : TRACK_WORDS + count, number].tolist():
        if len(records) >= count:  # kTurn makes two records of a word, so the rest is of an earlier run
            break
        tag, clock = word & _LOW, word >> 32 & _LOW
        at, before = at + (clock - before & _LOW), clock
        kind, event = tag & 3, tag >> 2 & 0x3FF
        time = origin + at * rate
        if kind == EventType.kTurn:
            records.append(Record(EventType.kEnd, began.pop() if began else event, time))
            kind = EventType.kBegin
        records.append(Record(kind, event, time))
        if kind == EventType.kBegin:
            began.append(event)
        elif kind == EventType.kEnd and began:
            began.pop()
    return Track(number // groups, number % groups, processor, records, count - len(records), origin + length * rate)


def _read_flashinfer(near: torch.Tensor, tracks: int, groups: int) -> Iterator[Track]:
    """Yield tracks of FlashInfer 0.2.7: records, then zeros, with a 32-bit time that all tracks share."""
    first: int | None = None
    for number in range(tracks):
        records = list[Record]()
        for word in near[1 + number :: tracks].tolist():
            if word == 0:
                break
            tag, time = word & _LOW, word >> 32 & _LOW
            first = time if first is None else first
            ns = (time - first + (1 << 31) & _LOW) - (1 << 31)
            records.append(Record(tag & 3, tag >> 2 & 0x3FF, float(ns)))
        if records:
            yield Track(number // groups, number % groups, None, records, 0, None)
