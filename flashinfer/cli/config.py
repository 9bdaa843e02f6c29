"""``show-config``: the environment as the library reads it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .. import env
from ..errors import EnvironmentValueError
from .table import Row, show
from .usage import Add, json_option

HELP = "Every environment variable that is read, its value now and its default."


def arguments(add: Add) -> None:
    json_option(add)
    add("--markdown", action="store_true", help="print the table of docs/environment.md")


def run(options: argparse.Namespace) -> int:
    if options.markdown:
        print(markdown_table())
        return 0
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
    show(rows, options.json, {"set": lambda is_set: "set" if is_set else ""})
    return code


def markdown_table() -> str:
    """Return the table of docs/environment.md; a test holds the two together."""
    lines = ["| variable | meaning | default |", "| --- | --- | --- |"]
    lines += [f"| `{v.name}` | {v.doc} | {v.default_doc} |".replace("|  |", "| |") for v in env.VARIABLES]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
