"""Builds of missing modules, one at run time or a whole matrix: locks, one ninja run, checks, publication."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .. import env
from ..errors import ArtifactError, FlashInferError, JitTimeoutError, ReentrantBuildError, ToolchainError
from . import frozen, process, remote
from .artifact import Artifact, build_key, read, verified
from .capture import WARM_UP, refuse_capture
from .events import emit
from .host import history, timeline
from .host.lock import Hold, try_hold, wait
from .host.progress import ConsoleProgress, Watch
from .lookup import Lookup, look_up, workspace_directory
from .machine.target import Target, narrowed, wanted_target
from .machine.toolchain import find_toolchain
from .machine.workspace import roots, workspace
from .publish import publish
from .run import Outcome, Request, Run, failure
from .spec import Spec
from .trace import record

AT_ONCE = 200  # modules in one ninja run: each holds a lock, and a process may have 1,024 open files

with process.one_step(), suppress(OSError):  # tempfile makes its first name under a lock
    tempfile.mkdtemp(dir=os.devnull)


def build_jit_specs(specs: Sequence[Spec], verbose: bool = False, skip_prebuilt: bool = True) -> list[Artifact]:
    """Return the artifacts of all specs. Build missing ones in one parallel run.

    Args:
        verbose: show every command and its output.
        skip_prebuilt: use artifacts of AOT directories as they are. ``False`` builds these too.

    Raises:
        BuildError: a module did not build (the first of them; all others are built).
        JitFrozenError, ToolchainError: a module is missing and must not, or cannot, be built.
    """
    found: dict[Spec, Artifact] = {}
    missing: dict[Spec, Lookup] = {}
    for spec in dict.fromkeys(specs):
        record(spec)
        lookup = look_up(spec)
        if lookup.artifact is not None and (skip_prebuilt or not lookup.artifact.is_prebuilt):
            emit("hit", spec.name, lookup.ms, path=lookup.artifact.path)
            found[spec] = lookup.artifact
        else:
            missing[spec] = lookup
    found |= build_missing(missing, verbose)
    return [found[spec] for spec in specs]


def build_missing(missing: Mapping[Spec, Lookup], verbose: bool = False) -> dict[Spec, Artifact]:
    """Build the modules of failed lookups."""
    requests, built = [], dict[Spec, Artifact]()
    for spec, lookup in missing.items():
        emit("miss", spec.name, lookup.ms, reason=lookup.reason)
        lookup = remote.without_building(spec, lookup)
        if lookup.artifact is not None:
            built[spec] = lookup.artifact
            continue
        frozen.check(spec.name, lookup.reason)
        refuse_capture(f"module {spec.name!r} is not built, and building it takes seconds", WARM_UP)
        requests.append(make_request(spec, key=lookup.key))
    for outcome in run(requests, verbose=verbose):
        if outcome.error is not None:
            raise outcome.error
        assert outcome.artifact is not None
        built[outcome.request.spec] = outcome.artifact
    return built


def make_request(
    spec: Spec, destination: Path | None = None, target: Target | None = None, key: str | None = None
) -> Request:
    """Return a request to build ``spec`` here. ``target`` is narrowed to the archs that it has kernels for.

    ``key``: the key of the spec, if it is known.

    Raises:
        ToolchainError: a tool is missing, no target is known, or there are no kernels for it. The text names
            the module.
        WorkspaceError: there is no directory for builds.
    """
    try:
        target, toolchain = target or wanted_target(spec.backend), find_toolchain(spec.backend)
        identity = toolchain.identity
    except ToolchainError as err:
        raise ToolchainError(f"module {spec.name!r} cannot be built: {err}") from None
    target, key = narrowed(target, spec.archs, spec.name), key or spec.key
    if destination is None:
        destination = workspace_directory(workspace(), spec, key, build_key(key, target, identity))
    return Request(spec, target, toolchain, key, destination)


def finished(request: Request) -> Artifact | None:
    """Return an existing artifact that equals the build, at its destination or in the workspace."""
    spec, key = request.spec, request.build_key
    in_workspace = [workspace_directory(root, spec, request.key, key) for root in roots()]
    for place in dict.fromkeys([request.destination, *in_workspace]):
        found = read(place, spec.name)
        if isinstance(found, Artifact) and found.manifest["build_key"] == key:
            with suppress(ArtifactError), verified(found):
                return found
    return None


def reused(request: Request) -> Outcome | None:
    """Copy an existing artifact to its destination. Return ``None`` if the module has to be built."""
    if (already := finished(request)) is None:
        return None
    try:
        if already.directory != request.destination:
            already = publish(already.path, already.manifest, request.destination)
        return Outcome(request, "reused", already)
    except (OSError, FlashInferError) as err:
        what = f"cannot publish at {request.destination}"
        return Outcome(request, "failed", error=failure(request.spec.name, what, err, roots()[-1]))


def run(
    requests: Sequence[Request], verbose: bool = False, jobs: int | None = None, watch: Watch | None = None
) -> list[Outcome]:
    """Build and publish all requests, each once on this machine. A failure does not stop the other builds.

    Modules that no other process is building are built in one ninja run. Then the process waits for the
    others. No process ever waits for one module while it holds the lock of another.
    """
    if len({request.spec.name for request in requests}) != len(requests):
        raise ValueError("requests: got two modules of one name, wanted distinct names")
    if not requests:
        return []
    remote.prepare()
    building = _Building(requests, jobs)
    while building.pending:
        holds: dict[Request, Hold] = {}
        try:
            building.take(holds)
            building.outcomes |= remote.fetched(holds)
            if holds:
                building.build(holds, verbose or env.JIT_VERBOSE.get(), watch)
        finally:
            for hold in holds.values():
                hold.abandon()
    outcomes = [building.outcomes[request] for request in requests]
    remote.publish(outcomes)
    if env.WORKSPACE_MAX_SIZE.is_set and any(outcome.how == "built" for outcome in outcomes):
        with process.one_step():
            from .gc import in_background  # imported only here, because only few builds collect

        in_background()
    return outcomes


class _Building:
    def __init__(self, requests: Sequence[Request], jobs: int | None) -> None:
        self.root = workspace()
        self.timeline = timeline.Timeline(time.time(), os.uname().nodename, os.getpid(), history.jobs(jobs))
        self.requests, self.outcomes, self.tried_again = requests, dict[Request, Outcome](), set[Request]()

    @property
    def pending(self) -> list[Request]:
        return [request for request in self.requests if request not in self.outcomes]

    def take(self, holds: dict[Request, Hold]) -> None:
        """Put the modules to build now into ``holds``: all free ones, else the first one after waiting."""
        for request in self.pending:
            if len(holds) < AT_ONCE:
                try:
                    self._keep(holds, request, try_hold(self._lock(request), request.spec.name))
                except ReentrantBuildError as err:
                    self.outcomes[request] = Outcome(request, "failed", error=err)
        if not holds and (pending := self.pending):
            request, name, start = pending[0], pending[0].spec.name, time.time()
            try:
                hold = wait(self._lock(request), name, lambda: finished(request) is not None)
            except JitTimeoutError as err:
                self.outcomes[request] = Outcome(request, "failed", error=err)
                return
            self.timeline.units.append(timeline.Unit("wait", name, name, "", start, time.time()))
            self._keep(holds, request, hold)

    def build(self, holds: dict[Request, Hold], verbose: bool, watch: Watch | None) -> None:
        runner = Run(holds, self.root, self.timeline)
        place = runner.folder / runner.directory(next(iter(holds)))
        try:
            runner(verbose, watch or ConsoleProgress([request.spec for request in holds], str(place)))
        except OSError as err:
            for request in holds:
                error = failure(request.spec.name, "cannot build", err, self.root)
                runner.outcomes.setdefault(request, Outcome(request, "failed", error=error))
            self.tried_again.update(holds)
        timeline.keep(self.timeline, self.root)
        for request, outcome in runner.outcomes.items():
            if outcome.artifact is None and runner.is_lost(request) and request not in self.tried_again:
                self.tried_again.add(request)
            else:
                self.outcomes[request] = outcome

    def _lock(self, request: Request) -> str:
        return f"{request.build_key} {self.root.resolve()}"

    def _keep(self, holds: dict[Request, Hold], request: Request, hold: Hold | None) -> None:
        # Look again, because another process may have built it meanwhile.
        if (outcome := reused(request)) is not None:
            self.outcomes[request] = outcome
            if hold is not None:
                hold.release()
        elif hold is not None:
            holds[request] = hold
