"""Streams of a wrapper's runs. A new plan must not overwrite one that a kernel still reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.compiler import is_dynamo_compiling

from .bound import Bound


class LastRun:
    """Stream of the last run through the full operator. Bound calls know their own streams."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def note(self, device: torch.device) -> None:
        """Record the current stream of ``device``."""
        if device.type == "cuda" and not is_dynamo_compiling():
            self._stream = torch.cuda.current_stream(device)

    def wait(self, device: torch.device, bound: Iterable[Bound | None]) -> None:
        """Let the current stream wait for the work of every other stream that ran the plan."""
        if device.type != "cuda":
            return
        handles = {call.stream() for call in bound if call is not None}
        if self._stream is not None:
            handles.add(self._stream.cuda_stream)
        # torch takes 0.1 us for the handle of the current stream, and 2 us for the stream.
        handles -= {-1, torch._C._cuda_getCurrentRawStream(device.index)}
        for handle in handles:
            other = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
            torch.cuda.current_stream(device).wait_stream(other)
