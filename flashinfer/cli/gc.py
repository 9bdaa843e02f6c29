"""``gc``: what takes up the workspace, what goes and what stays, and why."""

from __future__ import annotations

import argparse
import sys

from .. import env
from ..jit.gc import Item, collect
from ..jit.machine.workspace import workspace_root
from .table import age, show, size
from .usage import Add, json_option, size_limit

HELP = "Remove what was not used for longest, until the workspace is small enough; and what is left over."


def arguments(add: Add) -> None:
    json_option(add)
    add("--max-size", type=size_limit, metavar="SIZE", help="by default FLASHINFER_WORKSPACE_MAX_SIZE")
    add("--dry-run", action="store_true", help="only say what would be removed")


def run(options: argparse.Namespace) -> int:
    """Without a size, leftovers and old build directories go and every artifact stays."""
    root, limit = workspace_root(), options.max_size
    limit = env.WORKSPACE_MAX_SIZE.get() if limit is None else limit
    items = collect(root, limit, dry_run=options.dry_run)
    rows = [
        {
            "what": item.path.relative_to(root),
            "kind": item.kind,
            "size": item.size,
            "used": item.used,
            "fate": _fate(item, options.dry_run),
            "why": item.kept or item.why,
        }
        for item in items
    ]
    show(rows, options.json, {"size": size, "used": age})
    gone = sum(item.size for item in items if item.why and not item.kept)
    left = sum(item.size for item in items) - gone
    print(f"{root}: {size(gone)} {_fate_of_removed(options.dry_run)}, {size(left)} left", file=sys.stderr)
    if limit is not None and left > limit:
        print(f"that is more than {size(limit)}: the rest is in use or cannot be removed", file=sys.stderr)
        return 1
    return 0


def _fate(item: Item, dry_run: bool) -> str:
    return "stays" if item.kept or not item.why else _fate_of_removed(dry_run)


def _fate_of_removed(dry_run: bool) -> str:
    return "would be removed" if dry_run else "removed"
