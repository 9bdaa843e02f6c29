"""Progress of a build: at its start the modules and the expected time, later the finished steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..report import is_terminal, say, write
from ..spec import Spec
from . import history

EVERY = 10.0  # seconds between lines without a terminal


@dataclass
class Progress:
    """Numbers for a display: all steps and the finished ones, the unfinished modules, and the start time."""

    total: int = 0
    done: int = 0
    left: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)


Watch = Callable[[Progress], None]


class ConsoleProgress:
    """Display of a build at run time: one changing line on a terminal, a line every 10 seconds elsewhere."""

    def __init__(self, specs: Sequence[Spec], place: str) -> None:
        took = [history.estimate(spec) for spec in specs]
        # Modules share the CPUs, so the sum of their times estimates all of them.
        self.estimate = sum(filter(None, took)) if None not in took else None
        names = ", ".join(spec.name for spec in specs[:8]) + ", ..." * (len(specs) > 8)
        files = sum(len(spec.units()) for spec in specs)
        about = f", about {self.estimate:.0f} s" if self.estimate else ""
        say(f"building {names} ({files} source files{about}) in {place}")
        self.on_terminal, self.last = is_terminal(sys.stderr), time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        about = f" of about {self.estimate:.0f}" if self.estimate else ""
        left = ", ".join(progress.left[:4]) + ", ..." * (len(progress.left) > 4)
        text = f"{progress.done}/{progress.total} steps, {now - progress.started:.0f}{about} s: {left or 'done'}"
        if self.on_terminal:
            # The next line overwrites this one. At the end the line is cleared.
            write(f"\r\x1b[Kflashinfer: {text}" if progress.left else "\r\x1b[K")
        elif now - self.last >= EVERY:
            self.last = now
            say(text)
