"""Events of attention's kernels: which modules a wrapper runs that writes them, and the buffer of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._profiler.buffer import Attached, checked_buffer
from .operators import Operators, builtin_operators

_SCALARS = 2  # parameters of builtin variants behind their tensors, the last of which is the buffer


@dataclass
class Events(Attached):
    """Whether a wrapper's next plan is for kernels that write events, and where its next run writes them."""

    wanted: bool = False
    buffer: torch.Tensor | None = None

    def operators(self, *configuration: Any) -> Operators:
        """:func:`builtin_operators` of the next plan."""
        if not self.wanted and self.attached is None:
            return builtin_operators(*configuration)
        profiled = builtin_operators(*configuration, profiler=True)
        # Lists are those of kernels without events, of which more may be resident: both compute the same bits.
        return replace(profiled, plan=builtin_operators(*configuration).plan, run=_Run(profiled.run, self))

    def use(self, op: str, buffer: torch.Tensor | None, operators: Operators, device: torch.device) -> None:
        """Write the events of the run that follows to ``buffer``.

        Raises:
            ValueError, TypeError: a buffer that is missing, not wanted or of another kind.
        """
        given = self.given(buffer, operators.profiler)
        self.buffer = next(iter(checked_buffer(op, given, operators.profiler, device)), None)


@dataclass(frozen=True)
class _Run:
    """The operator of a module with events, called as that of one without."""

    run: Callable[..., None]
    events: Events

    def __call__(self, *args: Any) -> None:
        buffer = self.events.attached if self.events.buffer is None else self.events.buffer
        if buffer is None:
            raise ValueError("profiler_buffer: got None, wanted one: plan() was called for kernels that write events")
        self.run(*args[:-_SCALARS], buffer.view(torch.int64), *args[-_SCALARS:])
