"""Lookup of the artifact to load: first one of exactly the spec, then one that covers it.

An AOT directory, ``<aot>/<name>/``, is trusted as shipped: any artifact with the spec's key that runs here is
used, whatever compiler made it. The workspace, ``<root>/artifacts/<name>/<key>/<build key>/``, belongs to
this machine: if there is a toolchain, an artifact must have exactly its target and versions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..errors import ArtifactError, ToolchainError
from .artifact import Artifact, build_key, read, verified
from .machine import trust
from .machine.identity import Identity
from .machine.target import Target, narrowed, wanted_target, why_not_linkable, why_not_runnable
from .machine.toolchain import toolchain_identity
from .machine.workspace import NOEXEC, is_noexec, refused, roots, workspace_root
from .process import lazy
from .spec import Spec, Value

Needs = Mapping[str, Iterable[Value]]
Use = Callable[[Artifact, int], object]
OTHER_SOURCES = "built from other sources, flags or configuration"


@dataclass(frozen=True)
class Lookup:
    """Result of a lookup: the artifact or ``None``, a reason per rejected candidate, key and time."""

    artifact: Artifact | None
    reasons: tuple[str, ...]
    key: str = ""
    ms: float = 0.0

    @property
    def reason(self) -> str:
        directories = ", ".join(str(path) for path in (*env.aot_dirs(), *roots()))
        return "; ".join(self.reasons) or f"no artifact of that name is in {directories}"


class Machine:
    """The machine of this process: its target for a spec and its tools, or ``None`` if they are unknown.

    Without ``writes`` the answers of compilers are not stored. ``verify`` describes another machine by a
    subclass.
    """

    loads = True  # modules are loaded on this machine, from its file systems

    def __init__(self, spec: Spec, writes: bool = True) -> None:
        self.spec, self.backend, self.writes = spec, spec.backend, writes

    @lazy
    def asked(self) -> Target | None:
        """Return the target of this machine's modules."""
        with suppress(ToolchainError):
            return wanted_target(self.backend)
        return None

    @lazy
    def target(self) -> Target | None:
        with suppress(ToolchainError):
            return self.asked and narrowed(self.asked, self.spec.archs, self.spec.name)
        return None

    @lazy
    def identity(self) -> Identity | None:
        with suppress(ToolchainError):
            return toolchain_identity(self.backend, self.writes)
        return None

    def build_key(self, key: str) -> str:
        """Return the key that a build of ``key`` would have here, or an empty string without tools."""
        if self.target is None or self.identity is None:
            return ""
        return build_key(key, self.target, self.identity)

    def refuses(self, found: Artifact) -> str | None:
        """Return why an artifact of the right sources cannot be used here, or ``None``."""
        manifest, target = found.manifest, self.target
        if not found.is_prebuilt and self.build_key(manifest["key"]) not in ("", manifest["build_key"]):
            return "built for another target or by other tools"
        if self.asked is not None and target is None and self.asked.explicit:
            return f"built for {' '.join(found.archs)} alone, asked for {' '.join(self.asked.archs)}"
        if target is not None and target.explicit and not set(target.archs) <= set(found.archs):
            return f"built for {' '.join(found.archs)}, asked for {' '.join(target.archs)}"
        if self.loads and is_noexec(found.path):
            return NOEXEC
        return self.why_not_runnable(found.archs) or why_not_linkable(manifest["requires"], manifest["torch_abi"])

    def why_not_runnable(self, archs: Iterable[str]) -> str | None:
        return why_not_runnable(self.backend, archs, on_all=not self.spec.archs)


def workspace_directory(root: Path, spec: Spec, key: str, build_key: str) -> Path:
    return root / "artifacts" / spec.name / key[:32] / build_key[:32]


def look_up(spec: Spec, needs: Needs | None = None, use: Use | None = None, machine: Machine | None = None) -> Lookup:
    """Return the artifact to load for ``spec``: one with its key, else one that covers all needed values.

    Args:
        needs: the values of axes that the caller will use, or all values of an axis that is not named.
        use: called with the artifact and a descriptor of its verified library, before the descriptor is
            closed.
        machine: the machine that the artifact is for, by default this one, which stores its compilers' answers.

    No lock is taken. In each round AOT directories come first.
    """
    started = time.perf_counter()
    key, machine, reasons = spec.key, machine or Machine(spec), list[str]()

    def serves(found: Artifact) -> bool:
        if (refusal := machine.refuses(found) or _refused(found, use)) is not None:
            reasons.append(f"{found.directory}: {refusal}")
        return refusal is None

    artifact = next(filter(serves, _candidates(spec, key, needs, reasons)), None)
    return Lookup(artifact, tuple(reasons), key, (time.perf_counter() - started) * 1e3)


def _candidates(spec: Spec, key: str, needs: Needs | None, reasons: list[str]) -> Iterator[Artifact]:
    """Yield artifacts of the spec, exact ones first, then those that cover it.

    ``reasons``: why others do not.
    """
    wanted = {**dict(spec.coverage), **(needs or {})}
    for found in _places(spec.name, key[:32]):
        if isinstance(found, str):
            reasons.append(found)
        elif found.manifest["key"] == key:
            yield found
    stale = 0
    for found in (one for one in artifacts(spec.name) if one.manifest["key"] != key):
        if is_of(spec, found):
            if lacking := _lacking(found, wanted):
                reasons.append(f"{found.directory}: built without {lacking}")
            else:
                yield found
        elif found.is_prebuilt:
            reasons.append(f"{found.directory}: {OTHER_SOURCES}")
        else:
            stale += 1
    if stale:
        reasons.append(f"{stale} in the workspace {OTHER_SOURCES}: `flashinfer why {spec.name}` compares")
    if (refusal := refused(env.WORKSPACE_DIR.get())) is not None:
        reasons.append(f"{refusal}, so {workspace_root()} is used")


def _refused(found: Artifact, use: Use | None) -> str | None:
    """Verify an artifact and use it. Return the reason if that fails, or ``None``."""
    try:
        with verified(found) as descriptor:
            if use is not None:
                use(found, descriptor)
    except ArtifactError as err:
        return str(err)
    return None


def is_of(spec: Spec, found: Artifact) -> bool:
    """Return whether an artifact was built from the spec, with any values of its axes."""
    has = found.manifest["coverage"]
    with suppress(TypeError, ValueError):  # invalid values
        return bool(has.keys() == dict(spec.coverage).keys() and spec.covering(has).key == found.manifest["key"])
    return False


def _lacking(found: Artifact, wanted: Needs) -> str:
    """Return the needed values that an artifact was built without."""
    has = found.manifest["coverage"]
    lacking = {axis: set(values) - set(has.get(axis, ())) for axis, values in wanted.items()}
    return ", ".join(f"{axis} {' '.join(sorted(map(str, values)))}" for axis, values in lacking.items() if values)


def artifacts(name: str) -> Iterator[Artifact]:
    """Yield every artifact of a module's name, of any sources and for any machine."""
    return (found for found in _places(name) if isinstance(found, Artifact))


def _places(name: str, key: str | None = None) -> Iterator[Artifact | str]:
    """Yield the artifacts of a module (in the workspace: of one key), or the reasons why they are invalid."""
    places = [(directory / name, [directory]) for directory in env.aot_dirs()]
    for root in roots():
        parent = root / "artifacts" / name
        for folder in [parent / key] if key else _entries(parent):
            places += [(place, [root, root / "artifacts", parent, folder]) for place in _entries(folder)]
    for place, above in places:
        if (found := read(place, name)) is not None:
            try:
                yield next(filter(None, map(trust.refusal, above)), None) or found
            except OSError as err:
                yield f"{place}: {err}"


def _entries(directory: Path) -> list[Path]:
    """Return the entries of a directory, without the private directories of publications in progress."""
    with suppress(OSError):
        return [directory / name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    return []
