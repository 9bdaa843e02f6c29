"""``why``: compare what a load of a module needs with the nearest artifact, field by field."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..jit.lookup import Machine
from ..jit.machine.workspace import scratch
from ..jit.module import JitSpec
from ..jit.resolve import look_up
from .difference import apart, nearest
from .table import show
from .usage import Add, UsageError, json_option, named, recorded_specs

HELP = "Show where the nearest artifact differs from what a load needs. The exit code is 1 if it would be built."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("name", metavar="NAME", help="a module, as `list` names it, or one of --specs")
    add("--specs", type=Path, metavar="FILE", help="the modules recorded by `trace`")


def run(options: argparse.Namespace) -> int:
    """Return 0 if a load uses an artifact as it is, and 1 if it would have to build the module."""
    with scratch() as folder:
        spec, needs = _spec(options.name, options.specs, folder)
        lookup = look_up(spec, needs, machine=Machine(spec, cache_versions=False))
        found, differing = (lookup.artifact, {}) if lookup.artifact is not None else nearest(spec)
    rows = [{"field": name, "wanted": wanted, "nearest": has} for name, (has, wanted) in differing.items()]
    if options.json:
        answer = {"name": spec.name, "key": spec.key, "state": "missing" if lookup.artifact is None else "ready"}
        where = None if found is None else found.path
        show([{**answer, "nearest": where, "differences": rows, "reasons": lookup.reasons}], True)
        return int(lookup.artifact is None)
    if lookup.artifact is not None:
        print(f"{spec.name} is ready: a load uses {lookup.artifact.path}")
        return 0
    print(f"{spec.name} would be built: {lookup.reason}")
    if found is not None:
        print(f"nearest: {found.path}")
        show(
            [row | dict(zip(("wanted", "nearest"), apart(*differing[row["field"]]), strict=True)) for row in rows],
            False,
        )
    return 1


def _spec(name: str, specs: Path | None, folder: Path) -> tuple[JitSpec, dict[str, list[Any]] | None]:
    if specs is None:
        return named([name])[0], None
    recorded = {one.spec.name: one for one in recorded_specs(specs, folder)}
    if name not in recorded:
        raise UsageError(f"{specs} has no module {name!r}, only {', '.join(recorded)}")
    return recorded[name].spec, recorded[name].needs
