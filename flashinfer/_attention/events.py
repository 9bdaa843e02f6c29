"""Profiler events of attention: selection of the modules that write events, and the buffer of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._ops.arguments import check_present
from .._profiler.buffer import Attached, checked_buffer
from .operators import Operators, builtin_operators

_SCALARS = 2  # the last parameters of builtin variants; the buffer is the tensor before them


@dataclass
class Events(Attached):
    """Profiler state of a wrapper: its next plan's kernels, and its next run's buffer."""

    enabled: bool = False  # the kernels of the next plan write events
    buffer: torch.Tensor | None = None

    def operators(self, *configuration: Any) -> Operators:
        """Return :func:`builtin_operators` of the next plan, whose kernels write events."""
        profiled = builtin_operators(*configuration, profiler=True)
        # The kernels without events make the plan, because they may have more resident CTAs. The results then have
        # the same bits.
        return replace(profiled, plan=builtin_operators(*configuration).plan, run=_Run(profiled.run, self))

    def set_buffer(self, op: str, buffer: torch.Tensor | None, operators: Operators, device: torch.device) -> None:
        """Set the buffer of the next run's events.

        Raises:
            ValueError, TypeError: a buffer that is missing, unexpected or of another kind.
        """
        chosen = self.buffer_of_run(buffer, operators.profiler)
        self.buffer = next(iter(checked_buffer(op, chosen, operators.profiler, device)), None)


@dataclass(frozen=True)
class _Run:
    """Operator ``run`` of a module that writes events, with the signature of a module that writes none."""

    run: Callable[..., None]
    events: Events

    def __call__(self, *args: Any) -> None:
        buffer = self.events.attached if self.events.buffer is None else self.events.buffer
        why = "one: plan() was called for kernels that write events"
        buffer = check_present("run", "profiler_buffer", buffer, why)
        self.run(*args[:-_SCALARS], buffer.view(torch.int64), *args[-_SCALARS:])
