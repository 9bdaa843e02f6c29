"""``export``: write built modules to one archive, each checked."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from ..errors import ArtifactError
from ..jit.artifact import Artifact, read, verified
from ..jit.machine.workspace import scratch
from ..jit.modules import Matrix, matrix_specs
from ..jit.resolve import look_up
from .display import row
from .table import show, size
from .tar import File, pack
from .usage import Add, UsageError, json_option, named, recorded_specs

HELP = "Pack built modules into one archive: .tar, .tar.gz or .tar.zst."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("archive", type=Path, metavar="ARCHIVE", help="the file to write")
    add("names", nargs="*", metavar="NAME", help="a module, as `list` names it; by default every ready one")
    add("--specs", type=Path, metavar="FILE", help="the modules recorded by `trace`")
    add("--from", dest="source", type=Path, metavar="DIR", help="every module of a directory, for any machine")


def run(options: argparse.Namespace) -> int:
    """Export the artifacts that a load would use now, or with ``--from`` all artifacts of a directory."""
    archive: Path = options.archive.absolute()
    if sum(map(bool, (options.names, options.specs, options.source))) > 1:
        raise UsageError("export: got more than one of NAME, --specs and --from, wanted one at most")
    if not archive.parent.is_dir() or not os.access(archive.parent, os.W_OK):
        raise UsageError(f"archive: {archive.parent} is not a writable directory")
    chosen: dict[str, Artifact] = {}
    for found in _chosen(options):
        if chosen.setdefault(found.name, found).path != found.path:
            raise UsageError(f"export: two artifacts are named {found.name!r}: an archive holds one of each name")
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
            pack(archive, files)
        except OSError as err:
            raise ArtifactError(f"{archive} cannot be written: {err}") from None
    show(
        [row(found.name, "exported", found.archs, found) for _, found in sorted(chosen.items())],
        options.json,
        {"size": size},
    )
    return 0


def _chosen(options: argparse.Namespace) -> Iterator[Artifact]:
    if options.source is not None:
        for directory in sorted(options.source.glob("[!.]*/")):
            yield _whole(read(directory, directory.name), str(directory))
    elif options.specs is not None:
        with scratch() as folder:
            for recorded in recorded_specs(options.specs, folder):
                lookup = look_up(recorded.spec, recorded.needs)
                yield _whole(lookup.artifact or lookup.reason, recorded.spec.name)
    elif options.names:
        for spec in named(options.names):
            lookup = look_up(spec)
            yield _whole(lookup.artifact or lookup.reason, spec.name)
    else:
        for spec in matrix_specs(Matrix()):
            if (found := look_up(spec).artifact) is not None:
                yield found


def _whole(found: Artifact | str | None, what: str) -> Artifact:
    if not isinstance(found, Artifact):
        raise ArtifactError(f"{what} cannot be exported: {found or 'it is empty'}")
    return found
