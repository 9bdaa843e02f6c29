"""``list``: modules and artifacts, and whether a load would use each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import env
from ..jit.artifact import Artifact, read
from ..jit.machine.workspace import workspace_root
from ..jit.modules import Matrix, matrix_specs
from ..jit.resolve import Lookup, look_up
from ..jit.spec import Spec
from .difference import differences
from .table import age, show, size
from .usage import Add, json_option

HELP = "List every module of the AOT matrix and every artifact, and whether a load would use it."
COLUMNS = ("name", "state", "archs", "size", "built")  # of the table. --json has all columns.


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)


def run(options: argparse.Namespace) -> int:
    """Print one row per artifact, and one per module without any.

    States: ``ready`` (a load takes it), ``shadowed`` (a load takes an earlier one), ``refused`` (a load
    rejects it), ``stale`` (other sources or flags), ``broken``, ``other`` (no module of the matrix),
    ``missing`` (not built).
    """
    specs = {spec.name: spec for spec in matrix_specs(Matrix())}
    looked_up = {name: look_up(spec) for name, spec in specs.items()}
    rows = [_artifact_row(name, path, specs.get(name), looked_up.get(name)) for name, path in _directories()]
    for name, lookup in looked_up.items():
        if lookup.artifact is None:
            rows.append(_row(name, "missing", specs[name], why=lookup.reason if lookup.reasons else ""))
    rows.sort(key=lambda row: str(row["name"]))
    if not options.json:
        rows = [{"age" if key == "built" else key: row[key] for key in COLUMNS} for row in rows]
    show(rows, options.json, {"size": size, "age": age})
    return 0


def _row(name: str, state: str, spec: Spec | None, **more: Any) -> dict[str, Any]:
    """Return a row. ``more`` replaces the values of a missing module."""
    row: dict[str, Any] = {
        "name": name,
        "state": state,
        "archs": [],
        "size": None,
        "built": None,
        "why": "",
        "where": None,
    }
    if spec is not None:
        coverage = {axis: list(values) for axis, values in spec.coverage}
        row |= {"backend": spec.backend, "config": dict(spec.config), "coverage": coverage, "key": spec.key}
    return {**row, **more}


def _artifact_row(name: str, directory: Path, spec: Spec | None, lookup: Lookup | None) -> dict[str, Any]:
    found = read(directory, name)
    if not isinstance(found, Artifact):
        return _row(name, "broken", spec, why=found or "empty", where=directory)
    state, why = _state(found, spec, lookup)
    about = {"archs": list(found.archs), "size": found.manifest["size"], "built": found.manifest.get("built")}
    return _row(name, state, spec, **about, why=why, where=directory)


def _directories() -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of every artifact."""
    for directory in env.aot_dirs():
        for entry in _entries(directory):
            yield entry.name, entry
    for module in _entries(workspace_root() / "artifacts"):
        for key in _entries(module):
            for build in _entries(key):
                yield module.name, build


def _entries(directory: Path) -> list[Path]:
    """Return the directories in a directory, without the private ones of a publication in progress."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _state(found: Artifact, spec: Spec | None, lookup: Lookup | None) -> tuple[str, str]:
    """Return the state of an artifact and the reason for it."""
    if spec is None or lookup is None:
        return "other", ""
    if lookup.artifact is not None and lookup.artifact.path == found.path:
        return "ready", ""
    refusal = next((reason for reason in lookup.reasons if reason.startswith(f"{found.directory}: ")), None)
    differing = "; ".join(differences(found, spec))
    if refusal is not None:
        return ("stale", differing) if differing else ("refused", refusal.removeprefix(f"{found.directory}: "))
    return ("stale", differing) if differing else ("shadowed", "")
