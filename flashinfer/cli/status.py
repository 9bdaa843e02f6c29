"""``status``: artifacts, and what a load would make of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import env
from ..jit import store
from ..jit.artifact import Artifact, read
from ..jit.machine.workspace import workspace_root
from ..jit.modules import Matrix, matrix_specs
from ..jit.spec import Spec
from .difference import differences
from .table import age, show, size
from .usage import Add, json_option

HELP = "Every artifact in the AOT directories and the workspace, and what a load would make of it."


def arguments(add: Add) -> None:
    json_option(add)


def run(options: argparse.Namespace) -> int:
    """States: ``ready`` (a load takes it), ``shadowed`` (a load takes one that is found earlier), ``refused`` (a load
    passes it over), ``stale`` (made from other sources or flags), ``broken``, ``other`` (of no module of the matrix)
    and ``missing`` (a module of the matrix that a load would have to build)."""
    specs = {spec.name: spec for spec in matrix_specs(Matrix())}
    looked_up = {name: store.look_up(spec) for name, spec in specs.items()}
    rows: list[dict[str, Any]] = []
    for name, directory in _artifact_directories():
        found = read(directory, name)
        if isinstance(found, Artifact):
            state, why = _state(found, specs.get(name), looked_up.get(name))
            built, archs, length = found.manifest.get("built"), list(found.archs), found.manifest["size"]
        else:
            state, why, built, archs, length = "broken", found or "empty", None, [], None
        rows.append(
            {
                "name": name,
                "state": state,
                "archs": archs,
                "size": length,
                "built": built,
                "why": why,
                "where": directory,
            }
        )
    for name, lookup in looked_up.items():
        if lookup.artifact is None:
            rows.append({"name": name, "state": "missing", "archs": [], "size": None, "built": None})
            rows[-1] |= {"why": lookup.reason if lookup.reasons else "", "where": None}
    rows.sort(key=lambda row: row["name"])
    if options.json:
        show(rows, True)
    else:
        show(
            [{"age" if key == "built" else key: row[key] for key in row} for row in rows],
            False,
            {"size": size, "age": age},
        )
    return 0


def _artifact_directories() -> Iterator[tuple[str, Path]]:
    for directory in env.aot_dirs():
        for entry in _entries(directory):
            yield entry.name, entry
    for module in _entries(workspace_root() / "artifacts"):
        for key in _entries(module):
            for build in _entries(key):
                yield module.name, build


def _entries(directory: Path) -> list[Path]:
    """Directories in a directory, without the private ones of a publication that is under way."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _state(found: Artifact, spec: Spec | None, lookup: store.Lookup | None) -> tuple[str, str]:
    if spec is None or lookup is None:
        return "other", ""
    if lookup.artifact is not None and lookup.artifact.path == found.path:
        return "ready", ""
    refusal = next((reason for reason in lookup.reasons if reason.startswith(f"{found.directory}: ")), None)
    differing = "; ".join(differences(found, spec))
    if refusal is not None:
        return ("stale", differing) if differing else ("refused", refusal.removeprefix(f"{found.directory}: "))
    return ("stale", differing) if differing else ("shadowed", "")
