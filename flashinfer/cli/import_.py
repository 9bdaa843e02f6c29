"""``import``: publish the modules of an archive after checking all of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ..errors import ArtifactError
from ..jit.artifact import Artifact, publish, read, verified
from ..jit.machine import trust
from ..jit.machine.workspace import scratch, workspace
from .display import row
from .table import show, size
from .tar import unpack
from .usage import Add, json_option

HELP = "Unpack an archive of modules. Each is checked before any is published."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("archive", type=Path, metavar="ARCHIVE", help="the file to read")
    add("--to", type=Path, metavar="DIR", help="a directory for FLASHINFER_AOT_DIR; by default the workspace")


def run(options: argparse.Namespace) -> int:
    """Publish modules after all are read and checked. Equal modules that exist already are not replaced."""
    archive: Path = options.archive.absolute()
    root: Path = (options.to or workspace()).absolute()
    try:
        if (refusal := trust.refusal(archive)) is not None:
            raise ArtifactError(f"{refusal}: modules in it would be loaded")
        trust.make_directories(root)
        if (refusal := trust.refusal(root)) is not None:
            raise ArtifactError(f"{refusal}: nothing in it would be loaded")
        with scratch(root, ".import.") as folder:  # no other user can write into it
            staged = [_checked(folder / name, archive) for name in unpack(archive, folder)]
            destinations = [_destination(found, options.to, root) for found in staged]
            rows = [_published(found, path) for found, path in zip(staged, destinations, strict=True)]
    except OSError as err:
        raise ArtifactError(f"{archive} cannot be imported: {err}") from None
    show(rows, options.json, {"size": size})
    return 0


def _checked(directory: Path, archive: Path) -> Artifact:
    """Return an unpacked artifact after the checks of a load."""
    found = read(directory, directory.name)
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


def _published(found: Artifact, destination: Path) -> dict[str, Any]:
    existing = read(destination, found.name)
    if isinstance(existing, Artifact) and existing.manifest == found.manifest:
        try:
            with verified(existing):
                return row(existing.name, "there already", existing.archs, existing)
        except ArtifactError:
            pass
    return row(found.name, "imported", found.archs, publish(found.path, found.manifest, destination))
