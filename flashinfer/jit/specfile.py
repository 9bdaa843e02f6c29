"""Files of specs, one JSON value per line. ``trace`` writes them, and ``build``, ``verify`` and ``export`` read them.

A line holds ``spec`` (see :mod:`flashinfer.jit.specjson`), its ``key`` on the recording machine, ``needs`` and
``archs`` (its targets). ``needs`` maps axes to the used values. All values of an absent axis are needed. Such files may
be concatenated: lines of one spec are merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from .machine import trust
from .machine.target import CPU_LEVELS, Target
from .machine.workspace import write_atomically
from .module import JitSpec
from .spec import digest
from .specjson import from_json


@dataclass(frozen=True)
class RecordedSpec:
    """A module that a program requested. ``key``: its key on that machine. It differs here if the sources differ."""

    spec: JitSpec
    needs: dict[str, list[Any]]
    archs: tuple[str, ...]
    key: str

    def target(self) -> Target | None:
        """Return the recorded target: all GPU archs, the oldest CPU level, or ``None`` without a record."""
        if self.spec.backend == "cpu":
            # A level unknown to this version, such as another machine's "generic", sorts first.
            known = sorted(self.archs, key=lambda arch: CPU_LEVELS.index(arch) if arch in CPU_LEVELS else -1)
            return Target("cpu", tuple(known[:1]), True) if known else None
        return Target("cuda", self.archs, True) if self.archs else None


def merge(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per spec, in a deterministic order, with the needs and archs of all its lines."""
    merged: dict[str, dict[str, Any]] = {}
    for line in lines:
        one = merged.setdefault(digest([line["spec"], line["key"]]), line)
        # If one line does not name an axis, all of its values are needed.
        axes = sorted(one["needs"].keys() & line["needs"].keys())
        needs = {axis: sorted({*one["needs"][axis], *line["needs"][axis]}) for axis in axes}
        merged[digest([line["spec"], line["key"]])] = one | {
            "needs": needs,
            "archs": sorted({*one["archs"], *line["archs"]}),
        }
    return [merged[key] for key in sorted(merged, key=lambda key: (merged[key]["spec"]["name"], key))]


def write_specs(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Write a file of specs, completely or not at all. Return the number of specs."""
    merged = merge(lines)
    write_atomically(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in merged).encode())
    path.chmod(0o644)
    return len(merged)


def read_specs(path: Path, folder: Path) -> list[RecordedSpec]:
    """Read a file of specs. Sources that it contains are written below ``folder``.

    Raises:
        ValueError: there is no such file, a line is invalid, or other users can write the file.
    """
    try:
        if (refusal := trust.refusal(path)) is not None:
            raise ValueError(f"{refusal}: its sources are compiled and loaded")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ValueError(f"{path} cannot be read: {err}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(_record(line))
            except ValueError as err:
                raise ValueError(f"{path}, line {number}: {err}") from None
    result = []
    for one in merge(records):
        try:
            spec = from_json(JitSpec, one["spec"], folder)
            spec.files()  # fails if a file of the project is missing here
        except (OSError, ValueError) as err:
            raise ValueError(f"{path}: {one['spec']['name']}: {err}") from None
        result.append(RecordedSpec(spec, one["needs"], tuple(one["archs"]), one["key"]))
    return result


def _record(line: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or value.keys() != {"spec", "key", "needs", "archs"}:
        raise ValueError("got another line, wanted spec, key, needs and archs: a file that `trace` wrote")
    needs, archs = value["needs"], value["archs"]
    if not isinstance(value["spec"], dict) or not all(
        isinstance(value["spec"].get(k), str) for k in ("name", "backend")
    ):
        raise ValueError(f"spec: got {value['spec']!r}, wanted a spec")
    if not isinstance(value["key"], str):
        raise ValueError(f"key: got {value['key']!r}, wanted text")
    if not isinstance(needs, dict) or not all(map(_is_axis, needs.values())):
        raise ValueError(f"needs: got {needs!r}, wanted axis -> values")
    if not _is_words(archs):
        raise ValueError(f"archs: got {archs!r}, wanted a list of archs")
    if value["spec"]["backend"] == "cuda" and archs:
        env.parse_cuda_archs(" ".join(archs))
    elif any(not re.fullmatch(r"[a-z0-9-]+(\+[a-z0-9]+)*", arch) for arch in archs):
        raise ValueError(f"archs: got {archs!r}, wanted CPU levels")
    return value


def _is_axis(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len({type(one) for one in value}) <= 1
        and all(type(one) in (str, int) for one in value)
    )


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def one_per_name(specs: Iterable[RecordedSpec]) -> list[RecordedSpec]:
    """Merge specs for one directory: those that differ only in coverage become one that covers all.

    Raises:
        ValueError: two specs of one name differ in more.
    """
    found: dict[str, RecordedSpec] = {}
    for one in specs:
        other = found.setdefault(one.spec.name, one)
        was, now = other.spec, one.spec
        if was.covering({}) != now.covering({}):
            differs = [name for name in vars(was) if name != "coverage" and getattr(was, name) != getattr(now, name)]
            raise ValueError(
                f"two modules are named {was.name!r} and differ in {', '.join(differs)}:"
                " a directory holds one of each name; build them one after the other, into two directories"
            )
        sets: dict[str, set[Any]] = {axis: set(values) for axis, values in was.coverage}
        for axis, values in now.coverage:
            sets[axis] = sets.get(axis, set()) | set(values)
        archs = tuple(sorted({*other.archs, *one.archs}))
        found[was.name] = RecordedSpec(was.covering(sets), {}, archs, other.key)
    return list(found.values())
