"""``why``: what a load of a module wants, and where the nearest artifact differs, field by field."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import env
from ..jit import store
from ..jit.artifact import Artifact
from ..jit.module import JitSpec
from ..jit.spec import Spec
from ..jit.store import Here
from .output import plain, show
from .usage import UsageError, asked_in, named

Differences = dict[str, tuple[Any, Any]]  # field -> what the artifact has, what is wanted


def why(options: argparse.Namespace) -> int:
    """Exit code 0 where a load takes an artifact as it is, 1 where it would have to build the module."""
    with tempfile.TemporaryDirectory() as folder:
        spec, needs = _asked(options.name, options.specs, Path(folder))
        lookup = store.find(spec, needs, here=Here(spec, writes=False))
        found, differing = (lookup.artifact, {}) if lookup.artifact is not None else nearest(spec)
    rows = [{"field": name, "wanted": wanted, "nearest": has} for name, (has, wanted) in differing.items()]
    if options.json:
        answer = {"name": spec.name, "key": spec.key, "state": "missing" if lookup.artifact is None else "ready"}
        where = None if found is None else found.path
        show([{**answer, "nearest": where, "differences": rows, "reasons": lookup.reasons}], True)
        return int(lookup.artifact is None)
    if lookup.artifact is not None:
        print(f"{spec.name} is ready: a load takes {lookup.artifact.path}")
        return 0
    print(f"{spec.name} would be built: {lookup.reason}")
    if found is not None:
        print(f"nearest: {found.path}")
        show(
            [row | dict(zip(("wanted", "nearest"), _apart(*differing[row["field"]]), strict=True)) for row in rows],
            False,
        )
    return 1


def _asked(name: str, specs: Path | None, folder: Path) -> tuple[JitSpec, dict[str, list[Any]] | None]:
    if specs is None:
        return named([name])[0], None
    asked = {one.spec.name: one for one in asked_in(specs, folder)}
    if name not in asked:
        raise UsageError(f"{specs} has no module {name!r}, only {', '.join(asked)}")
    return asked[name].spec, asked[name].needs


def nearest(spec: Spec) -> tuple[Artifact | None, Differences]:
    """Of all artifacts of the module's name the one that differs in the fewest fields, and where it does."""
    here = Here(spec, writes=False)
    wanted = spec.fields()
    if here.target is not None:
        wanted["archs"] = list(here.target.archs)
    tools = {} if here.identity is None else {"toolchain": here.identity}
    best: tuple[Artifact | None, Differences] = None, {}
    for found in store.artifacts(spec.name):
        # What was built ahead of time may come of any tools.
        prebuilt = any(found.path.is_relative_to(directory) for directory in env.aot_dirs())
        differing = compare(found, wanted if prebuilt else wanted | tools)
        if best[0] is None or len(differing) < len(best[1]):
            best = found, differing
    return best


def compare(found: Artifact, wanted: Mapping[str, Any]) -> Differences:
    """Where the manifest of ``found`` is not as ``wanted``; files, axes and tools one by one."""
    result: Differences = {}
    for name, wants in wanted.items():
        has = found.manifest.get(name)
        if not isinstance(wants, dict):
            result |= {name: (has, wants)} if has != wants else {}
            continue
        has = has if isinstance(has, dict) else {}
        for part in sorted({*has, *wants}):
            if has.get(part) != wants.get(part):
                result[f"{name} {part}"] = has.get(part), wants.get(part)
    return result


def differences(found: Artifact, spec: Spec) -> list[str]:
    """What an artifact was built from and what ``spec`` says now, in words."""
    differing = compare(found, spec.fields())
    files = [name.removeprefix("files ") for name in differing if name.startswith("files ")]
    fields = [f"{name}: {has} -> {wants}" for name, (has, wants) in differing.items() if not name.startswith("files ")]
    return fields + [f"changed: {', '.join(files)}"] * bool(files)


def _apart(has: Any, wants: Any) -> tuple[str, str]:
    """Wanted and present as a person compares them: of two lists what is not in both, of a digest its beginning."""
    if isinstance(has, list) and isinstance(wants, list):
        only = [one for one in wants if one not in has], [one for one in has if one not in wants]
        return (plain(only[0]) or "-", plain(only[1]) or "-") if any(only) else (plain(wants), plain(has))
    wanted, present = ("-" if one is None else plain(one) for one in (wants, has))
    return (wanted[:12], present[:12]) if len(wanted) == 64 or len(present) == 64 else (wanted, present)
