"""``import``: the modules of an archive, each checked before any is published."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ..errors import ArtifactError
from ..jit.artifact import Artifact, read, verified
from ..jit.machine import trust
from ..jit.machine.workspace import scratch, workspace
from ..jit.publish import publish
from .display import row
from .table import show, size
from .tar import unpack
from .usage import Add, json_option

HELP = "Unpack an archive of modules, each checked before it is published."


def arguments(add: Add) -> None:
    json_option(add)
    add("archive", type=Path, metavar="ARCHIVE", help="the file to read")
    add("--to", type=Path, metavar="DIR", help="a directory for FLASHINFER_AOT_DIR; by default the workspace")


def run(options: argparse.Namespace) -> int:
    """Nothing is published before everything is read and checked; what stands there already is left alone."""
    archive: Path = options.archive.absolute()
    root: Path = (options.to or workspace()).absolute()
    try:
        if (refusal := trust.refusal(archive)) is not None:
            raise ArtifactError(f"{refusal}: what it holds is loaded")
        trust.make_directories(root)
        if (refusal := trust.refusal(root)) is not None:
            raise ArtifactError(f"{refusal}: nothing in it would be loaded")
        with scratch(root, ".import.") as folder:  # nobody else can put anything in here
            staged = [_checked(folder / name, archive) for name in unpack(archive, folder)]
            places = [_destination(found, options.to, root) for found in staged]
            rows = [_published(found, place) for found, place in zip(staged, places, strict=True)]
    except OSError as err:
        raise ArtifactError(f"{archive} cannot be imported: {err}") from None
    show(rows, options.json, {"size": size})
    return 0


def _checked(place: Path, archive: Path) -> Artifact:
    """What was unpacked, as a load would check it."""
    found = read(place, place.name)
    if not isinstance(found, Artifact):
        raise ArtifactError(f"{archive}: {found}")
    with verified(found):
        return found


def _destination(found: Artifact, to: Path | None, root: Path) -> Path:
    if to is not None:
        return root / found.name
    keys = [found.manifest["key"], found.manifest["build_key"]]
    if not all(re.fullmatch("[0-9a-f]{64}", key) for key in keys):
        raise ArtifactError(f"{found.name}: the manifest's keys are {keys}, wanted SHA-256")
    return Path(root, "artifacts", found.name, *(key[:32] for key in keys))


def _published(found: Artifact, place: Path) -> dict[str, Any]:
    there = read(place, found.name)
    if isinstance(there, Artifact) and there.manifest == found.manifest:
        try:
            with verified(there):
                return row(there.name, "there already", there.archs, there)
        except ArtifactError:
            pass
    return row(found.name, "imported", found.archs, publish(found.path, found.manifest, place))
