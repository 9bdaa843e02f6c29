"""``clean``: remove built modules from the workspace, the least recently used first, or all of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .. import env, jit
from ..jit.gc import Item, collect
from ..jit.machine.workspace import PARTS, workspace_root
from ..jit.report import write
from .table import age, show, size
from .usage import Add, UsageError, json_option, size_limit

HELP = "Remove leftovers and the least recently used modules of the workspace, or all modules. Needs --yes."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("--max-size", type=size_limit, metavar="SIZE", help="by default FLASHINFER_WORKSPACE_MAX_SIZE, or no limit")
    add("--all", action="store_true", help="remove everything that was built into the workspace")
    add("--yes", action="store_true", help="remove; without this, only print what would be removed")


def run(options: argparse.Namespace) -> int:
    """Return 1 if something that should be removed still exists."""
    if options.all and options.max_size is not None:
        raise UsageError("--all, --max-size: wanted one of them")
    code = _all(options) if options.all else _least_recently_used(options)
    if not options.yes:
        write("nothing is removed yet: add --yes\n")
    return code


def _all(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for part in (workspace_root() / name for name in PARTS):
        if part.is_dir():
            files = [os.path.join(folder, name) for folder, _, names in os.walk(part) for name in names]
            rows.append({"what": part, "files": len(files), "size": sum(os.lstat(file).st_size for file in files)})
    if options.yes:
        jit.clear_cache_dir()
    rows = [row | {"removed": not row["what"].exists()} for row in rows]
    show(rows, options.json, {"size": size, "removed": lambda removed: "yes" if removed else "no"})
    return int(options.yes and any(not row["removed"] for row in rows))


def _least_recently_used(options: argparse.Namespace) -> int:
    """Remove leftovers and old build directories, and with a size limit the artifacts beyond it."""
    root, limit = workspace_root(), options.max_size
    limit = env.WORKSPACE_MAX_SIZE.get() if limit is None else limit
    items = collect(root, limit, dry_run=not options.yes)
    show([_row(root, item, options.yes) for item in items], options.json, {"size": size, "used": age})
    gone = sum(item.size for item in items if item.reason and not item.obstacle)
    left = sum(item.size for item in items) - gone
    write(f"{root}: {size(gone)} {_removed(options.yes)}, {size(left)} left\n")
    if limit is not None and left > limit:
        write(f"that is more than {size(limit)}: the rest is in use or cannot be removed\n")
        return 1
    return 0


def _row(root: Path, item: Item, yes: bool) -> dict[str, Any]:
    fate = "stays" if item.obstacle or not item.reason else _removed(yes)
    what, why = item.path.relative_to(root), item.obstacle or item.reason
    return {"what": what, "kind": item.kind, "size": item.size, "used": item.used, "fate": fate, "why": why}


def _removed(yes: bool) -> str:
    return "removed" if yes else "would be removed"
