"""``clean``: removes what was built into the workspace."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .. import jit
from ..jit.machine.workspace import PARTS, workspace_root
from .table import show, size
from .usage import Add, json_option

HELP = "Remove everything that was built into the workspace."


def arguments(add: Add) -> None:
    json_option(add)
    add("--yes", action="store_true", help="do it; without this, only say what would be removed")


def run(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for part in (workspace_root() / name for name in PARTS):
        if part.is_dir():
            files = [os.path.join(folder, name) for folder, _, names in os.walk(part) for name in names]
            rows.append({"what": part, "files": len(files), "size": sum(os.lstat(file).st_size for file in files)})
    if options.yes:
        jit.clear_cache_dir()
    rows = [row | {"removed": not row["what"].exists()} for row in rows]
    show(rows, options.json, {"size": size, "removed": lambda removed: "yes" if removed else "no"})
    if rows and not options.yes:
        print("nothing is removed yet: add --yes", file=sys.stderr)
    return 1 if options.yes and any(not row["removed"] for row in rows) else 0
