"""Requests for modules, and the two sources that are read without a lock: AOT directories and the workspace.

From an AOT directory, ``<aot>/<name>/``, any artifact with the spec's key is used if it runs on this machine. Its
compiler does not matter. In the workspace, ``<root>/artifacts/<name>/<key>/<build key>/``, an artifact must also have
the target and the compiler versions of this machine, unless this machine has no toolchain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .. import env
from ..errors import ArtifactError, BuildError, ToolchainError
from .artifact import Artifact, build_key, read, verified
from .machine import trust
from .machine.target import Target, narrowed, wanted_target, why_not_linkable, why_not_runnable
from .machine.toolchain import Identity, Toolchain, toolchain_identity
from .machine.workspace import NOEXEC, is_noexec, root_refusal, roots, workspace, workspace_root
from .process import lazy
from .spec import Spec, Value

if TYPE_CHECKING:
    from .lock import Hold

Needs = Mapping[str, Iterable[Value]]
Use = Callable[[Artifact, int], object]
Candidates = Iterable[tuple[Path, list[Path]]]  # directory that may hold an artifact, and the parents to check
_STALE = "built from other source files, flags or configuration"


class Rejected:
    """The answer of a source that has no artifact: a reason per rejected candidate, or the error of a build."""

    def __init__(self, reasons: tuple[str, ...] = (), error: BuildError | None = None) -> None:
        self.reasons, self.error = reasons, error


Answers = Iterator[tuple["Request", Artifact | Rejected]]
Builder = Callable[["Mapping[BuildRequest, Hold]"], Iterator[tuple["BuildRequest", Artifact | Rejected]]]


class Machine:
    """The machine that uses a module: its target and its tools for a spec. ``None`` stands for an unknown value.

    This class describes this machine. ``verify`` describes other machines by a subclass. ``cache_versions``: store the
    versions that compilers report.
    """

    loads = True  # False: the module will be loaded elsewhere, so file systems of this machine do not matter

    def __init__(self, spec: Spec, cache_versions: bool = True) -> None:
        self.spec, self.backend, self.cache_versions = spec, spec.backend, cache_versions

    @lazy
    def requested_target(self) -> Target | None:
        """Return the target that the environment names, else the target of this machine."""
        with suppress(ToolchainError):
            return wanted_target(self.backend)
        return None

    @lazy
    def target(self) -> Target | None:
        """Return the requested target, narrowed to the archs of the spec's kernels."""
        with suppress(ToolchainError):
            return self.requested_target and narrowed(self.requested_target, self.spec.archs, self.spec.name)
        return None

    @lazy
    def identity(self) -> Identity | None:
        with suppress(ToolchainError):
            return toolchain_identity(self.backend, self.cache_versions)
        return None

    def build_key(self, key: str) -> str:
        """Return the build key of a build on this machine, or an empty string without tools."""
        if self.target is None or self.identity is None:
            return ""
        return build_key(key, self.target, self.identity)

    def refusal(self, found: Artifact) -> str | None:
        """Return why this machine cannot use an artifact of the spec, or ``None``."""
        manifest, target = found.manifest, self.target
        if not found.is_prebuilt and self.build_key(manifest["key"]) not in ("", manifest["build_key"]):
            return "built for another target or by other tools"
        if self.requested_target is not None and target is None and self.requested_target.explicit:
            return f"built for {' '.join(found.archs)} only, wanted {' '.join(self.requested_target.archs)}"
        if target is not None and target.explicit and not set(target.archs) <= set(found.archs):
            return f"built for {' '.join(found.archs)}, wanted {' '.join(target.archs)}"
        if self.loads and is_noexec(found.path):
            return NOEXEC
        return self.why_not_runnable(found.archs) or why_not_linkable(manifest["requires"], manifest["torch_abi"])

    def why_not_runnable(self, archs: Iterable[str]) -> str | None:
        return why_not_runnable(self.backend, archs, on_all=not self.spec.archs)


class Request:
    """A request for a module: an artifact with the spec's key, or one that covers all needed values.

    Args:
        needs: axis -> the values that the caller will use. For an axis that is absent, all values of the
            spec are needed.
        machine: the machine that will use the artifact, by default this one.
        use: called with the artifact and an open descriptor of its verified library.
        prebuilt: accept artifacts of AOT directories.
    """

    def __init__(
        self,
        spec: Spec,
        needs: Needs | None = None,
        machine: Machine | None = None,
        use: Use | None = None,
        prebuilt: bool = True,
    ) -> None:
        self.spec, self.needs, self.machine = spec, needs or {}, machine or Machine(spec)
        self.use, self.prebuilt, self.reason = use, prebuilt, ""  # reason: why a lookup missed

    @lazy
    def key(self) -> str:
        return self.spec.key

    @lazy
    def build_key(self) -> str:
        """Return the key of a build of this request, or an empty string without tools."""
        return self.machine.build_key(self.key)

    def refusal(self, found: Artifact) -> str | None:
        """Return why an artifact of the right source files does not answer this request, or ``None``."""
        return self.machine.refusal(found)

    @property
    def archs(self) -> tuple[str, ...]:
        """Return the archs to build for, or none if no target is known."""
        return self.machine.target.archs if self.machine.target is not None else ()

    @property
    def identity(self) -> Identity:
        """Return the versions of the build's tools, or an empty dictionary without tools."""
        return self.machine.identity or {}

    def destination_of(self, build_key: str) -> Path:
        """Return the directory in which to publish a build."""
        return workspace_directory(workspace(), self.spec, self.key, build_key)


class BuildRequest(Request):
    """A request for one build: an artifact of this target and these tools, published at ``destination``."""

    def __init__(self, spec: Spec, target: Target, toolchain: Toolchain, key: str, destination: Path) -> None:
        super().__init__(spec)
        self.target, self.toolchain, self.destination = target, toolchain, destination
        self.key, self.build_key = key, build_key(key, target, toolchain.identity)

    @property
    def archs(self) -> tuple[str, ...]:
        return self.target.archs

    @property
    def identity(self) -> Identity:
        return self.toolchain.identity

    @property
    def steps(self) -> int:
        """Return the number of commands of the build."""
        return len(self.spec.units()) + (2 if self.spec.backend == "cuda" else 1)  # CUDA: libtorch_cuda's stub

    def refusal(self, found: Artifact) -> str | None:
        return None if found.manifest["build_key"] == self.build_key else "not this build"

    def destination_of(self, build_key: str) -> Path:
        return self.destination


class Source:
    """A source of artifacts. ``reads_only``: it can be asked without the lock of the module."""

    reads_only = False

    def find(self, request: Request) -> Artifact | Rejected:
        raise NotImplementedError

    def artifacts(self, name: str) -> Iterator[Artifact]:
        """Yield every artifact of a module's name, from any source files and for any machine."""
        return iter(())

    def find_all(self, holds: Mapping[Request, Hold], build: Builder) -> Answers:
        """Yield answers to requests whose locks this process holds. Requests without an answer are retried."""
        for request in tuple(holds):
            yield request, self.find(request)


class Directories(Source):
    """Directories of artifacts. They need no lock, because each library is verified before its use."""

    reads_only = True

    def directories(self, name: str, key: str | None = None) -> Candidates:
        """Yield the directories that may contain a module. With ``key``, directories of other keys may be left out."""
        raise NotImplementedError

    def build_directories(self, request: BuildRequest) -> Candidates:
        """Yield the directories that may contain one build."""
        raise NotImplementedError

    def find(self, request: Request) -> Artifact | Rejected:
        """Return an artifact with the key of the request, else an artifact that covers all needed values."""
        reasons = list[str]()
        for found in self._candidates(request, reasons):
            if (reason := request.refusal(found) or _use_error(found, request.use)) is None:
                return found
            reasons.append(f"{found.directory}: {reason}")
        return Rejected(tuple(reasons))

    def artifacts(self, name: str) -> Iterator[Artifact]:
        return (found for found in _read(name, self.directories(name)) if isinstance(found, Artifact))

    def _candidates(self, request: Request, reasons: list[str]) -> Iterator[Artifact]:
        """Yield candidates for a request, those with its key first. Append to ``reasons`` why others are excluded."""
        spec, build = request.spec, request if isinstance(request, BuildRequest) else None
        candidates = self.directories(spec.name, request.key) if build is None else self.build_directories(build)
        for found in _read(spec.name, candidates):
            if isinstance(found, str):
                reasons.append(found)
            elif found.manifest["key"] == request.key:
                yield found
        stale, wanted = 0, {**dict(spec.coverage), **request.needs}
        for found in self.artifacts(spec.name) if build is None else ():
            if found.manifest["key"] == request.key:
                continue
            if is_built_from(spec, found):
                if lacking := _missing_values(found, wanted):
                    reasons.append(f"{found.directory}: built without {lacking}")
                else:
                    yield found
            elif found.is_prebuilt:
                reasons.append(f"{found.directory}: {_STALE}")
            else:
                stale += 1
        if stale:
            artifacts, were = ("artifact", "was") if stale == 1 else ("artifacts", "were")
            text = f"{stale} {artifacts} of this name in the workspace {were} {_STALE}"
            reasons.append(f"{text}; compare: `flashinfer why {spec.name}`")


class AotDirectories(Directories):
    """Artifacts built ahead of time, in ``FLASHINFER_AOT_DIR`` and ``data/aot``."""

    def directories(self, name: str, key: str | None = None) -> Candidates:
        return [(directory / name, [directory]) for directory in env.aot_dirs()]

    def build_directories(self, request: BuildRequest) -> Candidates:
        return [(request.destination, [])]

    def find(self, request: Request) -> Artifact | Rejected:
        return super().find(request) if request.prebuilt else Rejected()


class Workspace(Directories):
    """Artifacts built by this user's processes, or fetched from stores."""

    def directories(self, name: str, key: str | None = None) -> Candidates:
        for root in roots():
            parent = root / "artifacts" / name
            for folder in [parent / key[:32]] if key else _entries(parent):
                for directory in _entries(folder):
                    yield directory, [root, root / "artifacts", parent, folder]

    def build_directories(self, request: BuildRequest) -> Candidates:
        for root in roots():
            yield workspace_directory(root, request.spec, request.key, request.build_key), []

    def find(self, request: Request) -> Artifact | Rejected:
        answer = super().find(request)
        if isinstance(answer, Rejected) and (refusal := root_refusal(env.WORKSPACE_DIR.get())) is not None:
            return Rejected((*answer.reasons, f"{refusal}, so {workspace_root()} is used"))
        return answer


def workspace_directory(root: Path, spec: Spec, key: str, build_key: str) -> Path:
    return root / "artifacts" / spec.name / key[:32] / build_key[:32]


def is_built_from(spec: Spec, found: Artifact) -> bool:
    """Return whether an artifact was built from the spec, with any values of its axes."""
    has = found.manifest["coverage"]
    with suppress(TypeError, ValueError):  # invalid values
        return bool(has.keys() == dict(spec.coverage).keys() and spec.covering(has).key == found.manifest["key"])
    return False


def _use_error(found: Artifact, use: Use | None) -> str | None:
    """Verify an artifact and use it. Return the error as text, or ``None``."""
    try:
        with verified(found) as descriptor:
            if use is not None:
                use(found, descriptor)
    except ArtifactError as err:
        return str(err)
    return None


def _missing_values(found: Artifact, wanted: Needs) -> str:
    """Return the needed values that an artifact was built without."""
    has = found.manifest["coverage"]
    lacking = {axis: set(values) - set(has.get(axis, ())) for axis, values in wanted.items()}
    return ", ".join(f"{axis} {' '.join(sorted(map(str, values)))}" for axis, values in lacking.items() if values)


def _read(name: str, candidates: Candidates) -> Iterator[Artifact | str]:
    """Yield each artifact in the directories, or the reason why it is invalid."""
    for directory, parents in candidates:
        if (found := read(directory, name)) is not None:
            try:
                yield next(filter(None, map(trust.refusal, parents)), None) or found
            except OSError as err:
                yield f"{directory}: {err}"


def _entries(directory: Path) -> list[Path]:
    """Return the entries of a directory, without the private directories of publications in progress."""
    with suppress(OSError):
        return [directory / name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    return []
