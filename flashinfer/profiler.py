"""Events of kernels: traces for Perfetto, and HTML pages.

Kernels write events if a plan was made with ``use_profiler``, or for a wrapper after :func:`attach`. Each
such run needs a buffer. See docs/profiling.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ._ops.errors import type_error
from ._profiler.buffer import EVENT_NAMES, TRACK_WORDS, Attached, EventType, checked_buffer, decode_tag, read
from ._profiler.page import render
from ._profiler.trace import Timeline, timeline_of, to_json

__all__ = ["EVENT_NAMES", "EventType", "attach", "decode_tag", "export_to_html", "export_to_perfetto_trace"]
_log = logging.getLogger("flashinfer")


def attach(wrapper: Any, profiler_buffer: torch.Tensor | None) -> None:
    """Let the runs of a wrapper write their events to a buffer, from its next plan on.

    Any wrapper works, with or without ``use_profiler`` in its ``plan``. Results are the same, bit for bit.

    Args:
        wrapper: of decode, prefill or latent attention, or :class:`flashinfer.BatchAttention`.
        profiler_buffer: ``[words]`` uint64 or int64, on the wrapper's device; ``None``: the next plan uses
            kernels without events.

    Raises:
        ValueError: a buffer on another device, or of another form.
        TypeError: another object, or a wrapper with a custom variant; a buffer of another dtype.
    """
    events = getattr(wrapper, "_events", None)
    if not isinstance(events, Attached):
        raise type_error("attach", "wrapper", type(wrapper).__name__, "one of decode, prefill, attention or mla")
    if getattr(wrapper, "_custom", None) is not None:
        raise type_error("attach", "wrapper", "one with jit_args", "one of the library's own variants")
    if profiler_buffer is not None:
        device = wrapper.device if isinstance(profiler_buffer, torch.Tensor) else torch.device("cpu")
        checked_buffer("attach", profiler_buffer, True, device)
    events.attached = profiler_buffer


def export_to_perfetto_trace(
    profiler_buffer: torch.Tensor, event_names: Sequence[str], file_name: str | os.PathLike[str]
) -> None:
    """Write the events of a buffer as a trace for ui.perfetto.dev and chrome://tracing.

    A process of the trace is a multiprocessor, and a thread is one of its warpgroups. On the CPU a thread is
    a worker. ``otherData`` of the file counts dropped events and records without a partner; a warning logs
    them.

    Args:
        profiler_buffer: of a run, or of FlashInfer 0.2.7.
        event_names: names by number; those of this library's kernels are :data:`EVENT_NAMES`.
        file_name: a JSON file, overwritten.

    Raises:
        ValueError: no kernel has written to the buffer.
        TypeError: no tensor of 64-bit integers.
        OSError: the file cannot be written.
    """
    timeline = _timeline(profiler_buffer, event_names)
    Path(file_name).write_text(json.dumps(to_json(timeline), separators=(",", ":")))


def export_to_html(
    profiler_buffer: torch.Tensor, event_names: Sequence[str], file_name: str | os.PathLike[str], title: str = "Trace"
) -> None:
    """Write the events of a buffer as a page with their timeline. It needs only a browser.

    Args:
        profiler_buffer, event_names: as for :func:`export_to_perfetto_trace`.
        file_name: the page, overwritten.
        title: its heading.

    Raises:
        ValueError, TypeError, OSError: as :func:`export_to_perfetto_trace`.
    """
    Path(file_name).write_text(render(_timeline(profiler_buffer, event_names), title))


def _timeline(profiler_buffer: torch.Tensor, event_names: Sequence[str]) -> Timeline:
    recording = read(profiler_buffer)
    timeline = timeline_of(recording, event_names)
    if not recording.has_room:
        tracks = recording.blocks * recording.groups
        _log.warning(
            "profiler_buffer: got %d words, wanted more than %d for the %d tracks of this kernel: no event was recorded",
            profiler_buffer.numel(), 1 + TRACK_WORDS * tracks, tracks,
        )  # fmt: skip
    elif timeline.dropped or timeline.unbalanced:
        _log.warning(
            "profiler_buffer: %d events were dropped for which it had no room, %d records have no other half",
            timeline.dropped, timeline.unbalanced,
        )  # fmt: skip
    return timeline
