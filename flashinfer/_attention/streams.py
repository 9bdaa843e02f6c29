"""Streams of a wrapper's runs: a plan is not written over one that a kernel still reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.compiler import is_dynamo_compiling

from .bound import Bound


class LastRun:
    """The stream of the last run by the full operator; bound calls know their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def note(self, device: torch.device) -> None:
        if device.type == "cuda" and not is_dynamo_compiling():
            self._stream = torch.cuda.current_stream(device)

    def wait(self, device: torch.device, bound: Iterable[Bound | None]) -> None:
        """Let the current stream wait for all that was launched on the streams of runs, where these are others."""
        if device.type != "cuda":
            return
        here = torch.cuda.current_stream(device)
        raw = {one.stream() for one in bound if one is not None} - {-1}
        if self._stream is not None:
            raw.add(self._stream.cuda_stream)
        for stream in raw - {here.cuda_stream}:
            there = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
            here.wait_stream(there)
