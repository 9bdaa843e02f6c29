"""Output of a build: its progress, then a row for each module, then failures and reasons."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..jit.artifact import Artifact
from ..jit.history import Progress
from ..jit.report import is_terminal, write
from ..jit.resolve import Outcome


class Display:
    """Progress as a bar on a terminal, and as a line every 5 seconds elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.last = 0.0

    def __enter__(self) -> Display:
        with suppress(Exception):  # the terminal may close meanwhile
            self._start_bar()
        return self

    def _start_bar(self) -> None:
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            bar = Bar(*columns, console=Console(stderr=True), transient=True)
            bar.start()
            self.bar, self.task = bar, bar.add_task("starting", total=None)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            with suppress(Exception):
                self.bar.stop()

    def __call__(self, progress: Progress) -> None:
        left = ", ".join(progress.left[:4]) + (", ..." if len(progress.left) > 4 else "") or "done"
        if self.bar is not None:
            self.bar.update(self.task, total=progress.total, completed=progress.done, description=left)
            return
        now = time.monotonic()
        if now - self.last >= 5 or progress.done == progress.total:
            self.last, elapsed = now, now - progress.started
            to_go = elapsed / max(progress.done, 1) * (progress.total - progress.done)
            steps = f"{progress.done}/{progress.total} steps, {elapsed:.0f} s"
            write(f"{steps}, about {to_go:.0f} s to go: {left}\n")


def row(name: str, how: str, archs: Iterable[str], found: Artifact | None, why: str = "") -> dict[str, Any]:
    """Return one row of the table.

    ``how``: built, reused, failed or ready, and in a dry run build, copy or reuse.
    """
    manifest = found.manifest if found is not None else {}
    return {
        "name": name,
        "archs": list(archs),
        "size": manifest.get("size"),
        "seconds": manifest.get("seconds") if how == "built" else None,
        "how": how,
        "why": why,
        "path": found.path if found is not None else None,
    }


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Return the row of an outcome."""
    request, error = outcome.request, outcome.error
    archs = outcome.artifact.archs if outcome.artifact is not None else request.archs
    return row(request.spec.name, outcome.how, archs, outcome.artifact, error.reason if error else "")


def tell_failures(outcomes: Iterable[Outcome]) -> int:
    """Print the failures, and their reasons again at the very end. Return the exit code."""
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in failed:
        write(f"\nerror: {error}\n")
    for error in failed:
        write(f"FAILED {error.name}: {error.reason}\n")
    return 1 if failed else 0
