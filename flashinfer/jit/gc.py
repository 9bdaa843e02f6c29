"""Keeps the workspace small: what was not used for longest goes first, what is in use stays.

The time of the last use is the mtime of the manifest, which a load sets at most once a day and only where it can (see
``load.mark_used``): order is by days. One process of this machine collects at a time, so that two do not both remove
enough; loads and builds take no part in that. Removal is a rename into ``<workspace>/trash`` and then an
unlink, so nobody sees half an artifact: a loader has the file open or misses, and what is mapped works on without a
name. Killed half-way, it leaves trash for the next time.
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
from .host.lock import alone
from .machine import trust
from .machine.workspace import make_private, workspace_root

RECENT = 600.0  # seconds: who has just built something is about to load it
PATIENCE = 10.0  # seconds for which somebody else may collect
OLD = 86400.0  # seconds: no build goes on for a day without writing a file


@dataclass(frozen=True)
class Item:
    """A directory of the workspace: an ``artifact``, or what a ``build`` used or left over. ``why`` it is removed, or
    nothing; ``kept``: why it stays all the same."""

    path: Path
    kind: str
    size: int
    used: float
    why: str = ""
    kept: str = ""


def collect(root: Path, max_size: int | None = None, dry_run: bool = False, patience: float = PATIENCE) -> list[Item]:
    """Remove old build directories and leftovers, then artifacts until all is ``max_size`` bytes; says what and why.

    With ``dry_run`` it only says. ``max_size=None`` leaves every artifact. Who has no ``patience`` does nothing while
    somebody else does it.
    """
    with alone(lock_name(root), patience) as ours:
        return _collect(root, max_size, dry_run) if ours or patience else []


def lock_name(root: Path) -> str:
    """Names the lock of whoever removes things from a workspace."""
    return f"removal {root.resolve()}"


def _collect(root: Path, max_size: int | None, dry_run: bool) -> list[Item]:
    now, mapped, result = time.time(), cache(_mapped_libraries), []
    items = sorted(_items(root), key=lambda item: (item.kind == "artifact", item.used))
    total = sum(item.size for item in items)
    for item in items:
        if item.kind == "artifact" and max_size is not None and total > max_size:
            kept = "just built or used" if now - item.used < RECENT else _in_use(item.path, mapped())
            item = replace(item, why="beyond the size", kept=kept)
        elif item.kind != "artifact" and (now - item.used > OLD or item.path.parent.name == "trash"):
            item = replace(item, why="left over")
        if item.why and not item.kept:
            item = item if dry_run else replace(item, kept=_remove(item.path, root / "trash"))
            total -= item.size if not item.kept else 0
        result.append(item)
    return result


def in_background() -> None:
    """Start :func:`collect` in a thread, which a build does that FLASHINFER_WORKSPACE_MAX_SIZE asks to. Ending the
    process ends it."""
    root, limit = workspace_root(), env.WORKSPACE_MAX_SIZE.get()

    def run() -> None:
        gone = [
            item for item in collect(root, limit, patience=0) if item.kind == "artifact" and item.why and not item.kept
        ]
        if gone:
            # Not printed: a process that ends while another thread holds its standard error is aborted.
            names = ", ".join(item.path.parts[-3] for item in gone)
            logging.getLogger("flashinfer").info("%s was larger than %s bytes: removed %s", root, limit, names)

    threading.Thread(target=run, name="flashinfer-gc", daemon=True).start()


def _items(root: Path) -> Iterator[Item]:
    for place in (
        place for module in _folders(root / "artifacts") for key in _folders(module) for place in _folders(key)
    ):
        # Private until it is published, and left where its builder was killed.
        yield _item(place, "build") if place.name.startswith(".") else _item(place, "artifact", place / "manifest.json")
    for place in (place for part in ("build", "sources", "trash") for place in _folders(root / part)):
        if place.name != "ide":  # compile_commands.json names the headers in it
            yield _item(place, "build")


def _folders(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _item(place: Path, kind: str, stamp: Path | None = None) -> Item:
    """Size and last use of a directory: of its stamp, or of what was written in it last."""
    size, newest = 0, 0.0
    for folder, _, names in os.walk(place):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(OSError):  # gone meanwhile
                status = os.lstat(path)
                size, newest = size + status.st_size * (path != folder), max(newest, status.st_mtime)
    with suppress(OSError):
        newest = stamp.stat().st_mtime if stamp is not None else newest
    return Item(place, kind, size, newest)


def _mapped_libraries() -> dict[int, dict[str, str]]:
    """Inode -> ``device`` and ``name`` -> process, of every library that a process we may look at has mapped."""
    found: dict[int, dict[str, str]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        # One that has ended, or another user's: what that has mapped works without a name too.
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in (line.split(None, 5) for line in file if ".so" in line):
                name = os.path.basename(line[-1].strip().removesuffix(" (deleted)"))
                found.setdefault(int(line[4]), {}).update({line[3]: pid, name: pid})
    return found


def _in_use(place: Path, mapped: dict[int, dict[str, str]]) -> str:
    with suppress(OSError):
        for path in place.glob("*.so"):
            status = path.stat()
            # On overlay and btrfs the device in maps is not the one stat tells; the name is as good beside the inode.
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            users = mapped.get(status.st_ino, {})
            if (pid := users.get(device) or users.get(path.name)) is not None:
                return f"in use by process {pid}"
    return ""


def _remove(place: Path, trash: Path) -> str:
    """Take a directory out of sight in one step, then remove it; why that cannot be, or nothing."""
    try:
        trust.make_directories(trash)
        grave = make_private(trash)
        os.rename(place, grave)
        shutil.rmtree(grave, ignore_errors=True)
    except FileNotFoundError:
        pass  # somebody else was faster
    except OSError as err:
        return f"cannot be removed: {err.strerror}"
    return ""
