"""``export`` and ``import``: built modules as one archive, checked on both sides."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import ArtifactError
from ..jit import store
from ..jit.artifact import Artifact, read, verified
from ..jit.machine import trust
from ..jit.machine.workspace import workspace
from ..jit.modules import Matrix, matrix_specs
from ..jit.publish import publish
from .output import show, size
from .tar import File, pack, unpack
from .usage import UsageError, asked_in, named


def export(options: argparse.Namespace) -> int:
    """The artifacts that a load would take now; with ``--from`` every one of a directory, for whatever machine."""
    place: Path = options.archive.absolute()
    if sum(map(bool, (options.names, options.specs, options.source))) > 1:
        raise UsageError("export: got more than one of NAME, --specs and --from, wanted one at most")
    if not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
        raise UsageError(f"archive: {place.parent} is no directory that can be written")
    chosen: dict[str, Artifact] = {}
    for found in _chosen(options):
        if chosen.setdefault(found.name, found).path != found.path:
            raise UsageError(f"export: two artifacts are called {found.name!r}: an archive holds one of a name")
    if not chosen:
        raise ArtifactError("there is nothing to export: no module is built")
    with ExitStack() as stack:
        files = {}
        for name, found in chosen.items():
            library = os.fdopen(os.dup(stack.enter_context(verified(found))), "rb")
            stack.callback(library.close)
            library.seek(0)
            files[f"{name}/manifest.json"] = File.of(json.dumps(found.manifest, indent=1, sort_keys=True).encode())
            files[f"{name}/library.so"] = File(found.manifest["size"], found.manifest["sha256"], library)
        try:
            pack(place, files)
        except OSError as err:
            raise ArtifactError(f"{place} cannot be written: {err}") from None
    show([_row(found, "exported") for _, found in sorted(chosen.items())], options.json, {"size": size})
    return 0


def _chosen(options: argparse.Namespace) -> Iterator[Artifact]:
    if options.source is not None:
        for place in sorted(options.source.glob("[!.]*/")):
            yield _whole(read(place, place.name), str(place))
    elif options.specs is not None:
        with tempfile.TemporaryDirectory() as folder:
            for asked in asked_in(options.specs, Path(folder)):
                lookup = store.find(asked.spec, asked.needs)
                yield _whole(lookup.artifact or lookup.reason, asked.spec.name)
    elif options.names:
        for spec in named(options.names):
            lookup = store.find(spec)
            yield _whole(lookup.artifact or lookup.reason, spec.name)
    else:
        for spec in matrix_specs(Matrix()):
            if (found := store.find(spec).artifact) is not None:
                yield found


def _whole(found: Artifact | str | None, what: str) -> Artifact:
    if not isinstance(found, Artifact):
        raise ArtifactError(f"{what} cannot be exported: {found or 'it is empty'}")
    return found


def import_(options: argparse.Namespace) -> int:
    """Nothing is published before everything is read and checked; what stands there already is left alone."""
    archive: Path = options.archive.absolute()
    root: Path = (options.to or workspace()).absolute()
    try:
        if (refusal := trust.refusal(archive)) is not None:
            raise ArtifactError(f"{refusal}: what it holds is loaded")
        trust.make_directories(root)
        if (refusal := trust.refusal(root)) is not None:
            raise ArtifactError(f"{refusal}: nothing in it would be loaded")
        with tempfile.TemporaryDirectory(dir=root, prefix=".import.") as folder:
            # By mkdtemp's mode nobody else can put anything in here.
            staged = [_checked(Path(folder) / name, archive) for name in unpack(archive, Path(folder))]
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
                return _row(there, "there already")
        except ArtifactError:
            pass
    return _row(publish(found.path, found.manifest, place), "imported")


def _row(found: Artifact, how: str) -> dict[str, Any]:
    return {
        "name": found.name,
        "how": how,
        "archs": list(found.archs),
        "size": found.manifest["size"],
        "path": found.path,
    }
