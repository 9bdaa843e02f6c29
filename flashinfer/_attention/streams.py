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
        current = torch.cuda.current_stream(device)
        handles = {call.stream() for call in bound if call is not None} - {-1}
        if self._stream is not None:
            handles.add(self._stream.cuda_stream)
        for handle in handles - {current.cuda_stream}:
            other = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
            current.wait_stream(other)
