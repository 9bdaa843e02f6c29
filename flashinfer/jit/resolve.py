"""Resolution of requests to artifacts: the order of the sources, and the module's lock.

``find_existing`` asks the sources that only read. On a miss, ``resolve`` takes the module's lock and asks all sources
again, because another process may have built the module meanwhile. So one process of a machine fetches or builds a
module, and all others wait. A process that has only hits never imports the code that fetches or builds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import env
from ..errors import BuildError, JitFrozenError, JitTimeoutError, ReentrantBuildError, ToolchainError
from . import frozen, process
from .artifact import Artifact
from .events import emit
from .frozen import WARM_UP, refuse_capture
from .lookup import (
    Answers,
    AotDirectories,
    Builder,
    BuildRequest,
    Machine,
    Needs,
    Rejected,
    Request,
    Source,
    Workspace,
)
from .machine.workspace import roots
from .spec import Spec

if TYPE_CHECKING:
    from .build import Session
    from .history import Timeline, Watch
    from .lock import Hold

MAX_MODULES = 200  # modules in one ninja run: each holds a lock, and a process may have 1,024 open files


class Remote(Source):
    """Source that fetches artifacts from the stores of ``FLASHINFER_STORE``, several at once."""

    def find_all(self, holds: Mapping[Request, Hold], build: Builder) -> Answers:
        if holds and env.STORE.is_set:
            from .remote.transfer import fetch_all

            yield from fetch_all(tuple(holds))


class Build(Source):
    """Source that compiles modules on this machine, all in one run of ninja."""

    def find_all(self, holds: Mapping[Request, Hold], build: Builder) -> Answers:
        builds = {one if isinstance(one, BuildRequest) else checked_build_request(one): one for one in holds}
        answers = build({request: holds[one] for request, one in builds.items()}) if builds else ()
        for request, answer in answers:
            yield builds[request], answer


SOURCES: tuple[Source, ...] = (AotDirectories(), Workspace(), Remote(), Build())


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


class Outcome:
    """The result of a request.

    ``how`` is ``ready``, ``reused``, ``built`` or ``failed``. A reused artifact was fetched, built by another process,
    or copied from another directory. ``timeline`` is the timeline of the build.
    """

    def __init__(
        self,
        request: Request,
        how: str,
        artifact: Artifact | None = None,
        error: BuildError | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.request, self.how, self.artifact, self.error, self.timeline = request, how, artifact, error, timeline


def look_up(spec: Spec, needs: Needs | None = None, machine: Machine | None = None) -> Lookup:
    """Return the artifact that a load would use. The arguments are those of :class:`.lookup.Request`."""
    return find_existing(Request(spec, needs, machine))


def find_existing(request: Request) -> Lookup:
    """Look up an artifact in the sources that only read, without a lock."""
    started, artifact, reasons = time.perf_counter(), None, list[str]()
    for source in (one for one in SOURCES if one.reads_only):
        answer = source.find(request)
        if isinstance(answer, Artifact):
            artifact = answer
            break
        reasons += answer.reasons
    return Lookup(artifact, tuple(reasons), request.key, (time.perf_counter() - started) * 1e3)


def artifacts(name: str) -> Iterator[Artifact]:
    """Yield every artifact on this machine with a module's name, for any key and any target."""
    for source in SOURCES:
        yield from source.artifacts(name)


def resolve(
    requests: Sequence[Request], verbose: bool = False, jobs: int | None = None, watch: Watch | None = None
) -> list[Outcome]:
    """Find, fetch or build modules, each once on this machine. A failure does not stop the others.

    The process first takes all free locks, fetches these modules, and builds the missing ones in one run. Then it waits
    for modules of other processes. It never waits while it holds a lock, so processes cannot deadlock.

    Raises:
        JitFrozenError, ToolchainError, CaptureError: a module is missing and must not, or cannot, be built.
    """
    if len({request.spec.name for request in requests}) != len(requests):
        raise ValueError("requests: got two modules of one name, wanted distinct names")
    outcomes, missing = dict[Request, Outcome](), dict[Request, Request]()
    for request in requests:
        if isinstance(request, BuildRequest):
            missing[request] = request
        elif (lookup := find_existing(request)).artifact is not None:
            emit("hit", request.spec.name, lookup.ms, path=lookup.artifact.path)
            outcomes[request] = Outcome(request, "ready", lookup.artifact)
        else:
            emit("miss", request.spec.name, lookup.ms, reason=lookup.reason)
            missing[request] = _as_build_request(request, lookup.reason)
    if missing:
        made_outcomes = _fetch_or_build([*missing.values()], verbose, jobs, watch)
        outcomes |= {request: made_outcomes[to_make] for request, to_make in missing.items()}
    return [outcomes[request] for request in requests]


def _fetch_or_build(
    requests: Sequence[Request], verbose: bool, jobs: int | None, watch: Watch | None
) -> dict[Request, Outcome]:
    """Ask all sources in order for missing modules, under the locks of these modules."""
    session, outcomes = _import_session()(verbose, jobs, watch), dict[Request, Outcome]()
    while pending := [request for request in requests if request not in outcomes]:
        try:
            outcomes |= _take_locks(pending, session)
            for source in SOURCES:
                for request, answer in source.find_all(session.holds, session.build):
                    if isinstance(answer, Artifact) or answer.error is not None:
                        how = "built" if isinstance(source, Build) else "reused"
                        outcomes[request] = _outcome(request, answer, how, session)
                        hold = session.holds.pop(request)
                        hold.release() if outcomes[request].artifact is not None else hold.abandon()
                    elif not source.reads_only:  # the first lookup recorded the reasons of the read-only sources
                        request.reason += "".join(f"; {reason}" for reason in answer.reasons)
        finally:
            for hold in session.holds.values():
                hold.abandon()
            session.holds.clear()
    built = [one.artifact for one in outcomes.values() if one.how == "built" and one.artifact is not None]
    if built and env.STORE_PUBLISH.get() and env.STORE.is_set:
        from .remote.transfer import publish_built

        publish_built(built)
    if built and env.WORKSPACE_MAX_SIZE.is_set:
        with process.without_forks():
            from .gc import collect_in_background  # imported only here, because only few builds collect

        collect_in_background()
    return outcomes


def _take_locks(pending: Sequence[Request], session: Session) -> dict[Request, Outcome]:
    """Take all free locks of pending modules. If no lock is free, wait for that of the first module.

    Return the outcomes of modules that another process built meanwhile, and of failed waits.
    """
    from .history import Unit
    from .lock import try_hold, wait

    locks = {request: f"{request.build_key or request.key} {session.root.resolve()}" for request in pending}
    outcomes = dict[Request, Outcome]()
    for request in pending:
        if len(session.holds) < MAX_MODULES:
            try:
                if (hold := try_hold(locks[request], request.spec.name)) is not None:
                    session.holds[request] = hold
            except ReentrantBuildError as err:
                outcomes[request] = Outcome(request, "failed", error=err)
    if not session.holds and (left := [request for request in pending if request not in outcomes]):
        request, name, start = left[0], left[0].spec.name, time.time()
        try:
            hold = wait(locks[request], name, lambda: find_existing(request).artifact is not None)
        except JitTimeoutError as err:
            return {**outcomes, request: Outcome(request, "failed", error=err)}
        session.timeline.units.append(Unit("wait", name, name, "", start, time.time()))
        if hold is not None:
            session.holds[request] = hold
        elif (outcome := reused(request)) is not None:
            outcomes[request] = outcome
    return outcomes


def reused(request: Request) -> Outcome | None:
    """Copy an existing artifact to the request's destination. Return its outcome, or ``None`` without an artifact."""
    found = find_existing(request).artifact
    return None if found is None else _outcome(request, found, "reused")


def _outcome(request: Request, answer: Artifact | Rejected, how: str, session: Session | None = None) -> Outcome:
    from .build import copy_to_destination

    if isinstance(answer, Artifact) and isinstance(request, BuildRequest):
        answer = copy_to_destination(answer, request)
    timeline = session.timeline if session is not None and how == "built" else None
    if isinstance(answer, Artifact):
        return Outcome(request, how, answer, timeline=timeline)
    return Outcome(request, "failed", error=answer.error, timeline=timeline)


def _import_session() -> type[Session]:
    """Return ``Session``. Import its code before a lock is taken, because an import may request a module."""
    with process.without_forks():
        from .build import Session

        if env.STORE.is_set:
            from .remote.transfer import stores

            for one in stores():
                one.prepare()
    return Session


def _as_build_request(request: Request, reason: str) -> Request:
    """Return a build request for a missing module.

    If this machine cannot build it but a store is set, return the request itself, so that only stores are asked.
    """
    request.reason, result = reason, request
    try:
        result = checked_build_request(request)
    except (JitFrozenError, ToolchainError):
        if not env.STORE.is_set or request.machine.target is None:
            raise
    refuse_capture(f"module {request.spec.name!r} is not built, and making it takes seconds", WARM_UP)
    return result


def checked_build_request(request: Request) -> BuildRequest:
    """Check that a missing module may be built, and return its build request.

    Raises:
        JitFrozenError, ToolchainError: the module must not, or cannot, be built.
    """
    frozen.check(request.spec.name, request.reason)
    with process.without_forks():
        from .build import make_request

    return make_request(request.spec, key=request.key)


def build_jit_specs(specs: Sequence[Spec], verbose: bool = False, skip_prebuilt: bool = True) -> list[Artifact]:
    """Return the artifacts of all specs. Build missing ones in one parallel run.

    Args:
        verbose: show every command and its output.
        skip_prebuilt: use artifacts of AOT directories as they are. ``False`` builds these too.

    Raises:
        BuildError: a module did not build (the first of them; all others are built).
        JitFrozenError, ToolchainError: a module is missing and must not, or cannot, be built.
    """
    found = dict[Spec, Artifact]()
    for spec in specs:
        record(spec)
    for outcome in resolve([Request(spec, prebuilt=skip_prebuilt) for spec in dict.fromkeys(specs)], verbose):
        if outcome.error is not None:
            raise outcome.error
        assert outcome.artifact is not None
        found[outcome.request.spec] = outcome.artifact
    return [found[spec] for spec in specs]


def record(spec: Spec, needs: Needs | None = None) -> None:
    """Record a request in ``FLASHINFER_JIT_TRACE``."""
    if env.JIT_TRACE.is_set:
        with process.without_forks():
            from . import trace

        trace.record(spec, needs)
