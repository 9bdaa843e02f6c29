"""What is to be built, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..errors import ArtifactError, BuildError
from . import store
from .artifact import Artifact, build_key, read, verified
from .host.timeline import Timeline
from .machine.target import Target, narrowed, wanted_target
from .machine.toolchain import Toolchain, find_toolchain
from .machine.workspace import roots, workspace
from .spec import Spec


@dataclass(frozen=True)
class Request:
    """A module to build for a target, and the directory to publish it at (by default its place in the workspace)."""

    spec: Spec
    target: Target
    toolchain: Toolchain
    key: str
    destination: Path

    @cached_property
    def build_key(self) -> str:
        return build_key(self.key, self.target, self.toolchain.identity)

    def finished(self) -> Artifact | None:
        """The very artifact that this would give: at its destination, or in the workspace to be copied there."""
        in_workspace = [store.workspace_directory(root, self.spec, self.key) / self.build_key[:32] for root in roots()]
        for place in dict.fromkeys([self.destination, *in_workspace]):
            found = read(place, self.spec.name)
            if isinstance(found, Artifact) and found.manifest["build_key"] == self.build_key:
                try:
                    with verified(found):
                        return found
                except ArtifactError:
                    continue
        return None


@dataclass(frozen=True)
class Outcome:
    """What became of a request. ``how``: ``built``, ``reused`` or ``failed``. ``timeline``: of the run that it was in."""

    request: Request
    how: str
    artifact: Artifact | None = None
    error: BuildError | None = None
    timeline: Timeline | None = field(default=None, repr=False, compare=False)


def make_request(spec: Spec, destination: Path | None = None, target: Target | None = None) -> Request:
    """What building ``spec`` here and now means; of ``target``, only the archs that it has kernels for are built.

    Raises:
        ToolchainError: a tool is missing, nothing says what to compile for, or there are no kernels for that.
        WorkspaceError: there is no place to build in.
    """
    target = narrowed(target or wanted_target(spec.backend), spec.archs, spec.name)
    toolchain, key = find_toolchain(spec.backend), spec.key
    if destination is None:
        place = store.workspace_directory(workspace(), spec, key)
        destination = place / build_key(key, target, toolchain.identity)[:32]
    return Request(spec, target, toolchain, key, destination)
