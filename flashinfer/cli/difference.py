"""Differences between an artifact and the build that a load needs, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..jit.artifact import Artifact
from ..jit.lookup import Machine
from ..jit.machine.toolchain import Identity
from ..jit.resolve import artifacts
from ..jit.spec import Spec
from .table import plain

Differences = dict[str, tuple[Any, Any]]  # field -> value of the artifact, value that a load needs


def nearest(spec: Spec) -> tuple[Artifact | None, Differences]:
    """Return the artifact of the module's name that differs in the fewest fields, and these differences."""
    here = Machine(spec, cache_versions=False)
    wanted = spec.fields()
    if here.target is not None:
        wanted["archs"] = list(here.target.archs)
    tools = {} if here.identity is None else {"toolchain": here.identity}
    best: tuple[Artifact | None, Differences] = None, {}
    for found in artifacts(spec.name):
        # Artifacts built ahead of time may come from any tools.
        differing = compare(found, wanted if found.is_prebuilt else wanted | tools)
        if best[0] is None or len(differing) < len(best[1]):
            best = found, differing
    return best


def compare(found: Artifact, wanted: Mapping[str, Any]) -> Differences:
    """Return the fields of the manifest that differ from ``wanted``.

    Files, axes and tools count separately.
    """
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


def differences(
    found: Artifact, spec: Spec, archs: Iterable[str] | None = None, identity: Identity | None = None
) -> list[str]:
    """Format an artifact's differences from ``spec``, and from ``archs`` and ``identity`` if known."""
    wanted = spec.fields() | ({} if archs is None else {"archs": [*archs]})
    wanted |= {} if identity is None else {"toolchain": identity}
    differing = compare(found, wanted)
    files = [name.removeprefix("files ") for name in differing if name.startswith("files ")]
    fields = [f"{name}: {has} -> {wants}" for name, (has, wants) in differing.items() if not name.startswith("files ")]
    return fields + [f"changed: {', '.join(files)}"] * bool(files)


def apart(has: Any, wants: Any) -> tuple[str, str]:
    """Format the wanted and the present value: lists without their common elements, digests as prefixes."""
    if isinstance(has, list) and isinstance(wants, list):
        only = [one for one in wants if one not in has], [one for one in has if one not in wants]
        return (plain(only[0]) or "-", plain(only[1]) or "-") if any(only) else (plain(wants), plain(has))
    wanted, present = ("-" if one is None else plain(one) for one in (wants, has))
    return (wanted[:12], present[:12]) if len(wanted) == 64 or len(present) == 64 else (wanted, present)
