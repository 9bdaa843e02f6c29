"""Tell how a build goes: at once its modules and the time they took before, later its progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..report import is_terminal, say, write
from ..spec import Spec
from . import history

EVERY = 10.0  # seconds between lines where nobody looks at a terminal


@dataclass
class Progress:
    """Numbers that a display shows: edges done of all, modules not finished yet, when it began."""

    total: int = 0
    done: int = 0
    left: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)


Watch = Callable[[Progress], None]


class Voice:
    """The display of a build at run time: one line of progress on a terminal, elsewhere a line now and then."""

    def __init__(self, specs: Sequence[Spec], place: str) -> None:
        took = [history.estimate(spec) for spec in specs]
        # Together they share the CPUs: no more is known than the sum, and that the longest takes what it takes.
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
            # The line is written over by the next one, and in the end by nothing.
            write(f"\r\x1b[Kflashinfer: {text}" if progress.left else "\r\x1b[K")
        elif now - self.last >= EVERY:
            self.last = now
            say(text)
