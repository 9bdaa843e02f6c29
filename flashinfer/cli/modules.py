"""``list``, ``status``, ``build``, ``clean``: modules, their artifacts and the workspace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import env, jit
from ..errors import BuildError
from ..jit import frozen, store
from ..jit.artifact import Artifact, read
from ..jit.machine.workspace import PARTS, workspace_root
from ..jit.module import JitSpec
from ..jit.modules import Matrix, matrix_specs
from .output import age, show, size
from .usage import named
from .why import differences


def list_modules(options: argparse.Namespace) -> int:
    rows = [
        {
            "name": spec.name,
            "backend": spec.backend,
            "config": dict(spec.config),
            "coverage": {axis: list(values) for axis, values in spec.coverage},
            "key": spec.key,
        }
        for spec in matrix_specs(Matrix())
    ]
    show(rows, options.json, {"key": lambda key: key[:16]})
    return 0


def status(options: argparse.Namespace) -> int:
    """States: ``ready`` (a load takes it), ``shadowed`` (a load takes one that is found earlier), ``refused`` (a load
    passes it over), ``stale`` (made from other sources or flags), ``broken``, ``other`` (of no module of the matrix)
    and ``missing`` (a module of the matrix that a load would have to build)."""
    specs = {spec.name: spec for spec in matrix_specs(Matrix())}
    looked_up = {name: store.find(spec) for name, spec in specs.items()}
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


def _state(found: Artifact, spec: JitSpec | None, lookup: store.Lookup | None) -> tuple[str, str]:
    if spec is None or lookup is None:
        return "other", ""
    if lookup.artifact is not None and lookup.artifact.path == found.path:
        return "ready", ""
    refusal = next((reason for reason in lookup.reasons if reason.startswith(f"{found.directory}: ")), None)
    differing = "; ".join(differences(found, spec))
    if refusal is not None:
        return ("stale", differing) if differing else ("refused", refusal.removeprefix(f"{found.directory}: "))
    return ("stale", differing) if differing else ("shadowed", "")


def build_modules(options: argparse.Namespace) -> int:
    from ..jit.build import make_request, run

    rows: list[dict[str, Any]] = []
    errors: list[BuildError] = []
    requests = []
    for spec in named(options.names):
        lookup = store.find(spec)
        if lookup.artifact is not None:
            rows.append(_built(spec.name, "ready", lookup.artifact))
        else:
            frozen.check(spec.name, lookup.reason)
            requests.append(make_request(spec))
    for outcome in run(requests, verbose=options.verbose):
        rows.append(_built(outcome.request.spec.name, outcome.how, outcome.artifact))
        if outcome.error is not None:
            errors.append(outcome.error)
    show(sorted(rows, key=lambda row: str(row["name"])), options.json, {"size": size})
    for error in errors:
        print(f"\nerror: {error}", file=sys.stderr)
    return 1 if errors else 0


def _built(name: str, how: str, artifact: Artifact | None) -> dict[str, Any]:
    return {
        "name": name,
        "how": how,
        "archs": list(artifact.archs) if artifact else [],
        "size": artifact.manifest["size"] if artifact else None,
        "path": artifact.path if artifact else None,
    }


def clean(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for part in (workspace_root() / name for name in PARTS):
        if part.is_dir():
            files = [os.path.join(folder, name) for folder, _, names in os.walk(part) for name in names]
            rows.append({"what": part, "files": len(files), "size": sum(os.lstat(file).st_size for file in files)})
    if options.yes:
        jit.clear_cache_dir()
    rows = [row | {"removed": not row["what"].exists()} for row in rows]
    show(rows, options.json, {"size": size, "removed": lambda removed: "yes" if removed else "no"})
    if rows and not options.yes:
        print("nothing is removed yet: add --yes", file=sys.stderr)
    return 1 if options.yes and any(not row["removed"] for row in rows) else 0
