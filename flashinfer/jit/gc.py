"""Removal of old files from the workspace: the least recently used artifacts first, never those in use.

The time of the last use is the mtime of the manifest. A load sets it at most once a day, and only if it can
(see ``load.mark_used``), so the order is by days. One process of a machine collects at a time: two would
remove twice as much as necessary. Loads and builds do not wait for it. Removal is a rename into ``<workspace>/trash``
and then an unlink, so that nobody sees half an artifact: a loader has the file open or misses, and a mapped
library works without a name. A killed collection leaves trash for the next one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .. import env
from .lock import exclusive
from .machine import trust
from .machine.workspace import make_private, workspace_root

RECENT = 600.0  # seconds: a module just built is about to be loaded
PATIENCE = 10.0  # seconds to wait for another process that collects
OLD = 86400.0  # seconds: every build writes a file at least once a day


@dataclass(frozen=True)
class Item:
    """A directory of the workspace: an ``artifact``, or files that a ``build`` used or left.

    ``reason``: why to remove it, or empty. ``obstacle``: why it was not removed, or empty.
    """

    path: Path
    kind: str
    size: int
    used: float
    reason: str = ""
    obstacle: str = ""


def collect(root: Path, max_size: int | None = None, dry_run: bool = False, patience: float = PATIENCE) -> list[Item]:
    """Remove old build directories and leftovers, then artifacts until the workspace has at most ``max_size`` bytes.

    Return all items. ``dry_run`` removes nothing. ``max_size=None`` keeps every artifact. ``patience=0`` does
    nothing if another process collects.
    """
    with exclusive(lock_name(root), patience) as ours:
        return _collect(root, max_size, dry_run) if ours or patience else []


def lock_name(root: Path) -> str:
    """Return the name of the lock that guards removals from a workspace."""
    return f"removal {root.resolve()}"


def _collect(root: Path, max_size: int | None, dry_run: bool) -> list[Item]:
    now, mapped = time.time(), cache(_mapped_libraries)
    result = []
    items = sorted(_items(root), key=lambda item: (item.kind == "artifact", item.used))
    total = sum(item.size for item in items)
    for item in items:
        if item.kind == "artifact" and max_size is not None and total > max_size:
            obstacle = "just built or used" if now - item.used < RECENT else _in_use(item.path, mapped())
            item = replace(item, reason="workspace over its size limit", obstacle=obstacle)
        elif item.kind != "artifact" and (now - item.used > OLD or item.path.parent.name == "trash"):
            item = replace(item, reason="left over")
        if item.reason and not item.obstacle:
            item = item if dry_run else replace(item, obstacle=_remove(item.path, root / "trash"))
            total -= item.size if not item.obstacle else 0
        result.append(item)
    return result


def collect_in_background() -> None:
    """Start :func:`collect` in a thread, after a build with FLASHINFER_WORKSPACE_MAX_SIZE.

    The thread ends with the process.
    """
    root, limit = workspace_root(), env.WORKSPACE_MAX_SIZE.get()

    def run() -> None:
        gone = [
            item
            for item in collect(root, limit, patience=0)
            if item.kind == "artifact" and item.reason and not item.obstacle
        ]
        if gone:
            # Logged, not printed: a process that ends while another thread holds its standard error is
            # aborted.
            names = ", ".join(item.path.parts[-3] for item in gone)
            logging.getLogger("flashinfer").info("%s was larger than %s bytes: removed %s", root, limit, names)

    threading.Thread(target=run, name="flashinfer-gc", daemon=True).start()


def _items(root: Path) -> Iterator[Item]:
    for folder in (
        folder for module in _folders(root / "artifacts") for key in _folders(module) for folder in _folders(key)
    ):
        # The private directory of a publication, or one that a killed builder left.
        is_private = folder.name.startswith(".")
        yield _item(folder, "build") if is_private else _item(folder, "artifact", folder / "manifest.json")
    for folder in (folder for part in ("build", "sources", "trash") for folder in _folders(root / part)):
        if folder.name != "ide":  # compile_commands.json names the headers in it
            yield _item(folder, "build")


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _item(directory: Path, kind: str, stamp: Path | None = None) -> Item:
    """Return a directory with its size and last use: the mtime of ``stamp``, or of the newest file in it."""
    size, newest = 0, 0.0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(OSError):  # removed meanwhile
                status = os.lstat(path)
                size, newest = size + status.st_size * (path != folder), max(newest, status.st_mtime)
    with suppress(OSError):
        newest = stamp.stat().st_mtime if stamp is not None else newest
    return Item(directory, kind, size, newest)


def _mapped_libraries() -> dict[int, dict[str, str]]:
    """Return inode -> ``device`` and ``name`` -> process, for mapped libraries of readable processes."""
    found: dict[int, dict[str, str]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        # A process that has ended or belongs to another user is skipped: its mapped libraries work without a
        # name.
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in (line.split(None, 5) for line in file if ".so" in line):
                name = os.path.basename(line[-1].strip().removesuffix(" (deleted)"))
                found.setdefault(int(line[4]), {}).update({line[3]: pid, name: pid})
    return found


def _in_use(directory: Path, mapped: dict[int, dict[str, str]]) -> str:
    with suppress(OSError):
        for path in directory.glob("*.so"):
            status = path.stat()
            # On overlay and btrfs, maps shows another device than stat. Then the name confirms the inode.
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            users = mapped.get(status.st_ino, {})
            if (pid := users.get(device) or users.get(path.name)) is not None:
                return f"in use by process {pid}"
    return ""


def _remove(directory: Path, trash: Path) -> str:
    """Hide a directory in one step, then remove it. Return the reason why that failed, or an empty string."""
    try:
        trust.make_directories(trash)
        hidden = make_private(trash)
        os.rename(directory, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    except FileNotFoundError:
        pass  # another process removed it
    except OSError as err:
        return f"cannot be removed: {err.strerror}"
    return ""
