"""The buffer that kernels write events to. Its layout is that of include/flashinfer/common/profiler.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

# Events of this library's kernels, in the order of their numbers.
EVENT_NAMES = (
    "item", "load-q", "load-kv", "wait-q", "wait-k", "wait-v", "wait-max", "wait-p", "pack-kv", "gemm-qk", "softmax",
    "gemm-pv", "attend", "write-o",
)  # fmt: skip
CYCLES, NANOSECONDS = 1, 2  # what clocks count; 0 in buffers of FlashInfer 0.2.7, whose kernels write nanoseconds
TRACK_WORDS = 4  # of a track, before its events
_LOW = 0xFFFFFFFF
_MOST_WORDS = 0x7FFFFFFF  # of a buffer that kernels use


class EventType(IntEnum):
    """What a word says of its event; ``kTurn``: what began last ends, and this one begins, which are two records."""

    kBegin = 0
    kEnd = 1
    kInstant = 2
    kTurn = 3


@dataclass(frozen=True)
class Record:
    """Something that a track noted."""

    kind: int  # an EventType but kTurn, which is read as an end and a begin
    event: int
    time: float  # ns, from when the first track of the recording began


@dataclass(frozen=True)
class Track:
    """What one warpgroup of a block, or one worker of a CPU, noted."""

    block: int
    group: int
    place: int | None  # the multiprocessor, or the worker; None: the buffer does not say
    records: list[Record]
    dropped: int  # begins, ends and instants that the buffer had no room for
    end: float | None  # when the track was done


@dataclass(frozen=True)
class Recording:
    """What a kernel wrote to a buffer."""

    blocks: int
    groups: int
    clock: int  # CYCLES, NANOSECONDS or 0
    tracks: list[Track] = field(default_factory=list)  # those with events
    has_room: bool = True  # for any event

    @property
    def dropped(self) -> int:
        return sum(track.dropped for track in self.tracks)


@dataclass
class Attached:
    """The buffer that :func:`flashinfer.profiler.attach` gave a wrapper: of runs that are given none."""

    attached: torch.Tensor | None = None

    def given(self, buffer: torch.Tensor | None, profiler: bool) -> torch.Tensor | None:
        """The buffer of a run, of kernels with events or without."""
        return self.attached if buffer is None and profiler else buffer


def checked_buffer(
    op: str, buffer: torch.Tensor | None, profiler: bool, device: torch.device
) -> tuple[torch.Tensor] | tuple[()]:
    """The buffer of a run as an operator takes it, or nothing where kernels write no events.

    Raises:
        ValueError: one that is missing, or not wanted; no contiguous row of words on ``device``.
        TypeError: no tensor, or one of another dtype.
    """
    if not profiler:
        if buffer is not None:
            raise ValueError(
                f"{op}: profiler_buffer: got one, wanted None: plan() was called without use_profiler, for kernels that"
                " write no events"
            )
        return ()
    if buffer is None:
        raise ValueError(f"{op}: profiler_buffer: got None, wanted one: plan() was called with use_profiler")
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{op}: profiler_buffer: got {type(buffer).__name__}, wanted Tensor")
    if buffer.dtype not in (torch.uint64, torch.int64):
        raise TypeError(f"{op}: profiler_buffer: got {buffer.dtype}, wanted torch.uint64 or torch.int64")
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() < 1:
        raise ValueError(
            f"{op}: profiler_buffer: got shape {list(buffer.shape)}, wanted one dimension of 1 word or more, contiguous"
        )
    if buffer.device != device:
        raise ValueError(f"{op}: profiler_buffer: got one on {buffer.device}, wanted {device}")
    return (buffer.view(torch.int64),)


def decode_tag(tag: int, num_blocks: int, num_groups: int) -> tuple[int, int, int, int]:
    """What the low half of a record says: block, group, event and :class:`EventType`.

    Args:
        tag: 32 bits, of FlashInfer 0.2.7's kernels. Those of this library's say nothing of the block and the group, which
            their places in the buffer do, and may be :attr:`EventType.kTurn`.
        num_blocks, num_groups: of the kernel, as the buffer's first word has them.
    """
    track = tag >> 12 & 0xFFFFF
    return track // num_groups % max(num_blocks, 1), track % num_groups, tag >> 2 & 0x3FF, tag & 3


def read(profiler_buffer: torch.Tensor) -> Recording:
    """What a kernel wrote to a buffer, one of this library's or of FlashInfer 0.2.7's.

    Raises:
        TypeError: no tensor of 64-bit integers.
        ValueError: nothing was written to it.
    """
    if not isinstance(profiler_buffer, torch.Tensor) or profiler_buffer.dtype not in (torch.uint64, torch.int64):
        kind = profiler_buffer.dtype if isinstance(profiler_buffer, torch.Tensor) else type(profiler_buffer).__name__
        raise TypeError(f"profiler_buffer: got {kind}, wanted a tensor of torch.uint64 or torch.int64")
    near = profiler_buffer.detach().reshape(-1).view(torch.int64).cpu()
    first = int(near[0]) & 0xFFFFFFFFFFFFFFFF if near.numel() else 0
    blocks, groups, clock = first & _LOW, first >> 32 & 0xFFFF, first >> 48
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
    # Times are from the first start on: those of a GPU count from 1970, where a float64 has steps of 256 ns.
    began = min((head[1] for head in heads if head[2] & _LOW), default=0)
    heads = [[head[0], head[1] - began, head[2], head[3] - began] for head in heads]
    rate = _rate(heads) if clock == CYCLES else 1.0
    found = [_read_track(words, number, groups, head, rate) for number, head in enumerate(heads) if head[2] & _LOW]
    return Recording(blocks, groups, clock, found)


def _rate(heads: Sequence[Sequence[int]]) -> float:
    """Nanoseconds of a cycle, by all tracks: one may be shorter than a tick of the timer."""
    done = [head for head in heads if head[2] & _LOW]
    cycles = sum((head[2] >> 32) - (head[0] >> 32) & _LOW for head in done)
    return sum(head[3] - head[1] for head in done) / cycles if cycles else 1.0


def _read_track(words: torch.Tensor, number: int, groups: int, head: Sequence[int], rate: float) -> Track:
    place, start, count = head[0] & _LOW, head[0] >> 32 & _LOW, head[2] & _LOW
    length = (head[2] >> 32) - start & _LOW
    # The middle of the track is where both its ends together say: an end alone is off by a tick of the timer.
    origin = (head[1] + head[3]) / 2 - length * rate / 2
    records, at, before, began = list[Record](), 0, start, list[int]()
    for word in words[TRACK_WORDS : TRACK_WORDS + count, number].tolist():
        if len(records) >= count:  # what stands behind is of a run before: there were turns, two records in a word
            break
        tag, clock = word & _LOW, word >> 32 & _LOW
        at, before = at + (clock - before & _LOW), clock
        kind, event, time = tag & 3, tag >> 2 & 0x3FF, origin + at * rate
        if kind == EventType.kTurn:
            records.append(Record(EventType.kEnd, began.pop() if began else event, time))
            kind = EventType.kBegin
        records.append(Record(kind, event, time))
        if kind == EventType.kBegin:
            began.append(event)
        elif kind == EventType.kEnd and began:
            began.pop()
    return Track(number // groups, number % groups, place, records, count - len(records), origin + length * rate)


def _read_flashinfer(near: torch.Tensor, tracks: int, groups: int) -> Iterator[Track]:
    """Tracks of FlashInfer 0.2.7: records alone, zeros behind them, of a 32-bit time that all share."""
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
