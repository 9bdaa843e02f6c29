"""Output of rows: a table by rich on a terminal, aligned words elsewhere, JSON on request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..jit.report import is_terminal

Row = Mapping[str, Any]


def plain(value: Any) -> str:
    """Format a value for a reader."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {plain(item)}" for name, item in value.items())
    return str(value)


def size(count: int | None) -> str:
    """Format bytes in the unit that makes them short."""
    if count is None:
        return ""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def age(built: float | None) -> str:
    """Format the time since a moment in its largest unit."""
    if built is None:
        return ""
    seconds = max(time.time() - built, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def show(rows: Sequence[Row], as_json: bool, formats: Mapping[str, Callable[[Any], str]] | None = None) -> None:
    """Print rows, all with the same columns. ``formats`` formats columns for a reader, not in JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=1, default=str))
        return
    if not rows:
        print("nothing")
        return
    columns = list(rows[0])
    how = {column: (formats or {}).get(column, plain) for column in columns}
    cells = [[how[column](row[column]) for column in columns] for row in rows]
    if is_terminal(sys.stdout):
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for line in cells:
            table.add_row(*line)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(len(line[index]) for line in [columns, *cells]) for index in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip())
