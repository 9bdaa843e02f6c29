"""Keeps the workspace small: what was not used for longest goes first, what is in use stays.

The time of the last use is the mtime of the manifest, which a load sets at most once a day and only where it can (see
``load.mark_used``): order is by days. No lock is taken. Removal is a rename into ``<workspace>/trash`` and then an
unlink, so nobody sees half an artifact: a loader has the file open or misses, and what is mapped works on without a
name. Killed half-way, it leaves trash for the next time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .. import env
from .events import say

RECENT = 600.0  # seconds: who has just built something is about to load it
OLD = 86400.0  # seconds: no build goes on for a day without writing a file
_PARTS = {"build": "build", "sources": "build", "trash": "leftover"}  # folder of the workspace -> kind of what is in it


@dataclass(frozen=True)
class Item:
    """Something in the workspace that takes up ``size`` bytes, last ``used`` at that time.

    ``kind``: ``artifact``, ``build`` (a directory that a build ran in, or its sources) or ``leftover`` (of a process
    that was killed). ``why`` it is removed; empty where it stays. ``kept``: why it stays although it should not.
    """

    path: Path
    kind: str
    size: int
    used: float
    why: str = ""
    kept: str = ""


def collect(root: Path, max_size: int | None = None, dry_run: bool = False) -> list[Item]:
    """Remove leftovers, old build directories and then artifacts until all is ``max_size`` bytes; says what and why.

    With ``dry_run`` it only says. ``max_size=None`` leaves every artifact.
    """
    now, mapped, result = time.time(), _mapped_libraries(), []
    items = sorted(_items(root), key=lambda item: (item.kind == "artifact", item.used))
    total = sum(item.size for item in items)
    for item in items:
        if item.kind == "artifact" and max_size is not None and total > max_size:
            recent = "just built or used" if now - item.used < RECENT else ""
            item = replace(item, why="beyond the size", kept=recent or _in_use(item.path, mapped))
        elif item.kind != "artifact" and (now - item.used > OLD or item.path.parent.name == "trash"):
            item = replace(
                item, why=f"not written for {OLD / 3600:.0f} h" if now - item.used > OLD else "removed before"
            )
        if item.why and not item.kept and not dry_run:
            item = replace(item, kept=_remove(item.path, root / "trash"))
        if item.why and not item.kept:
            total -= item.size
        result.append(item)
    return result


def in_background() -> None:
    """Start :func:`collect` in a thread where FLASHINFER_WORKSPACE_MAX_SIZE asks for it. Ending the process ends it."""
    limit = env.WORKSPACE_MAX_SIZE.get()
    if limit is not None:
        arguments = (env.WORKSPACE_DIR.get(), limit)
        threading.Thread(target=_collect_and_say, args=arguments, name="flashinfer-gc", daemon=True).start()


def _collect_and_say(root: Path, limit: int) -> None:
    removed = [item for item in collect(root, limit) if item.why and not item.kept]
    artifacts = [item for item in removed if item.kind == "artifact"]
    if artifacts:
        mib = sum(item.size for item in removed) / (1 << 20)
        say(f"{root} was larger than {limit} bytes: removed {len(artifacts)} modules and {mib:.0f} MiB in all")


def _items(root: Path) -> Iterator[Item]:
    for module in _folders(root / "artifacts"):
        for key in _folders(module):
            for place in _folders(key):
                kind = "leftover" if place.name.startswith(".") else "artifact"  # private until it is published
                yield _item(place, kind, place / "manifest.json")
    for part, kind in _PARTS.items():
        for place in _folders(root / part):
            if place.name == "ide":
                continue  # compile_commands.json names the headers in it
            yield _item(place, kind)


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
            try:
                status = os.lstat(path)
            except OSError:
                continue  # gone meanwhile
            size, newest = size + status.st_size * (path != folder), max(newest, status.st_mtime)
    try:
        return Item(place, kind, size, stamp.stat().st_mtime if stamp is not None else newest)
    except OSError:
        return Item(place, kind, size, newest)


def _mapped_libraries() -> dict[int, dict[str, str]]:
    """Inode -> ``device`` and ``name`` -> process, of every library that a process we may look at has mapped."""
    found: dict[int, dict[str, str]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as file:
                lines = [line.split(None, 5) for line in file if ".so" in line]
        except OSError:
            continue  # it has ended, or is another user's: what it has mapped works without a name too
        for line in lines:
            path = line[-1].strip().removesuffix(" (deleted)")
            found.setdefault(int(line[4]), {}).update({line[3]: pid, os.path.basename(path): pid})
    return found


def _in_use(place: Path, mapped: dict[int, dict[str, str]]) -> str:
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
        trash.mkdir(exist_ok=True)
        grave = tempfile.mkdtemp(dir=trash)
        if place.parent != trash:
            os.rename(place, grave)
            place = Path(grave)
    except FileNotFoundError:
        return ""  # somebody else was faster
    except OSError as err:
        return f"cannot be removed: {err.strerror}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(grave, ignore_errors=True)
    return ""
