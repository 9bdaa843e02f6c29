"""``doctor --config``: the environment variables as the library reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import env
from ..errors import EnvironmentValueError
from .table import Row, show


def show_config(as_json: bool) -> int:
    """Print every variable with its value and default. Return 2 if a value is invalid."""
    rows, code = [], 0
    for variable in env.VARIABLES:
        try:
            value = _plain(variable.get())
        except EnvironmentValueError as err:
            value, code = f"error: {err}", 2
        row: Row = {
            "variable": variable.name,
            "value": value,
            "set": variable.is_set,
            "default": variable.default_doc.replace("`", ""),
        }
        rows.append(row)
    show(rows, as_json, {"set": lambda is_set: "set" if is_set else ""})
    return code


def markdown_table() -> str:
    """Return the table of docs/environment.md. A test compares the two."""
    lines = ["| variable | meaning | default |", "| --- | --- | --- |"]
    lines += [f"| `{v.name}` | {v.doc} | {v.default_doc} |".replace("|  |", "| |") for v in env.VARIABLES]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
