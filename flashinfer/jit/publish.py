"""Publication of a library and its manifest, completely or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .artifact import MANIFEST, Artifact, sealed
from .elf import needed_versions
from .machine import trust
from .machine.workspace import about, make_private


def elf_requirements(path: Path) -> dict[str, str]:
    """Return the newest symbol versions that a library needs of others: ``{"GLIBC": "2.34", ...}``."""
    needs = [(library, number) for library, _, number in (name.partition("_") for name in needed_versions(path))]
    # The last one of each library remains, which is the newest.
    return dict(sorted((need for need in needs if need[1][:1].isdigit()), key=lambda need: _version(need[1])))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    """Make a library and its manifest an artifact at ``destination``, completely or not at all.

    The steps are: private directory, fsync, rename. An existing artifact is exchanged in one step, and
    processes that have mapped it keep it.

    Raises:
        OSError: the destination cannot be written. The error names the path.
    """
    with about(destination):
        return _publish(so, manifest, destination)


def _publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    trust.make_directories(destination.parent)
    name = manifest["name"]
    private = make_private(destination.parent, f".{destination.name}.")
    try:
        shutil.copyfile(so, private / f"{name}.so")
        manifest = sealed(manifest)
        (private / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path, mode in ((private / f"{name}.so", 0o644), (private / MANIFEST, 0o644), (private, 0o755)):
            path.chmod(mode)
            _sync(path)
        _replace_directory(private, destination)
        _sync(destination.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return Artifact(name, destination / f"{name}.so", manifest)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_directory(new: Path, destination: Path) -> None:
    for _ in range(100):
        try:
            os.rename(new, destination)  # also replaces an empty directory
            return
        except OSError:
            if not destination.is_dir():
                raise
        if _exchange(new, destination):
            return  # ``new`` now holds the old artifact, which the caller removes
        # This file system cannot exchange: a load sees a miss for a moment, but never a mixture.
        retired = make_private(destination.parent, f".{destination.name}.old.")
        with suppress(FileNotFoundError):  # another process retired it
            os.rename(destination, retired)
        shutil.rmtree(retired, ignore_errors=True)
    raise OSError(f"{destination}: replaced by other processes again and again")


def _exchange(first: Path, second: Path) -> bool:
    at_cwd, exchange = -100, 2
    status = ctypes.CDLL(None).renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    return bool(status == 0)
