"""Gives modules to the workers of a Dask scheduler, takes in what they built, and publishes it here.

The queue is kept here and a module is bound to one worker: only those are used that have the right tools and the files,
which is known after they were asked, and Dask places no waiting task on a worker that becomes fit later.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ArtifactError, BuildError, ClusterError, DependencyError, FlashInferError
from .. import build
from ..artifact import MANIFEST, Artifact, read, verified
from ..events import emit
from ..host import timeline
from ..host.progress import Progress, Watch
from ..host.timeline import Timeline, Unit
from ..machine.identity import Identity
from ..machine.target import Target, narrowed
from ..machine.toolchain import Toolchain, find_toolchain, find_torch
from ..machine.trust import make_directories
from ..machine.workspace import scratch, workspace, write_atomically
from ..publish import publish
from ..report import guarded, say
from ..run import Outcome, Request
from ..spec import Spec, digest
from . import tasks
from .job import PROTOCOL, Job, Tools, described, packed, tools_of, unmarked

TICK = 0.25  # seconds between two looks at who is there
ATTEMPTS = 4  # times that a module may be given to a worker, as often as Dask gives a task


@dataclass(frozen=True)
class Elsewhere(Toolchain):
    """The tools of workers, for a client that has none."""

    of_workers: tuple[tuple[str, str | bool | None], ...] = ()

    @property
    def identity(self) -> Identity:
        return dict(self.of_workers)


@dataclass
class _Worker:
    """A worker that was asked: modules that it has room for, the backends it can build, or why it is not used."""

    free: int
    backends: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class _Task:
    """What a worker has been given, and what is done with its answer."""

    address: str
    then: Callable[[Any], None]
    request: Request | None = None


class Fleet:
    """A connection to a scheduler, and the tools that modules are wanted of.

    Raises:
        ClusterError: no scheduler answers within ``wait`` seconds.
        DependencyError: ``distributed`` is not installed.
    """

    def __init__(self, address: str, wait: float) -> None:
        try:
            from distributed import Client
        except ImportError as err:
            raise DependencyError("distributed", str(err), "cluster") from None
        for name in ("distributed.client", "distributed.core", "distributed.comm"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # what goes wrong is said once, by us
        self.address, self.wait, self.wanted = address, wait, dict[str, Tools]()
        try:
            self.client: Any = Client(address, timeout=max(wait, 1), set_as_default=False, name="flashinfer")
        except (OSError, RuntimeError, TypeError, ValueError) as err:
            raise ClusterError(f"no scheduler answers at {address} within {wait:.0f} s: {err}") from None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        # What is still under way ends when nobody waits for it any more: see tasks.make.
        with suppress(Exception):
            self.client.close(timeout=5)

    def request(self, spec: Spec, destination: Path, target: Target) -> Request:
        """What building ``spec`` for ``target`` means, by this machine's tools or by those that most workers share."""
        target = narrowed(target, spec.archs, spec.name)
        return Request(spec, target, self._toolchain(spec.backend), spec.key, destination)

    def _toolchain(self, backend: str) -> Toolchain:
        mine = tools_of(backend)
        if isinstance(mine, dict):
            self.wanted[backend] = mine
            return find_toolchain(backend)
        if backend not in self.wanted:
            self.wanted[backend] = self._of_most(backend, mine)
            most = described(self.wanted[backend])
            say(f"{backend} modules are built by what most workers have, {most}: here {mine}")
        identity = {name: value for name, value in self.wanted[backend].items() if name != "torch"}
        return Elsewhere("c++", None, "ninja", find_torch(), of_workers=tuple(identity.items()))

    def _of_most(self, backend: str, mine: str) -> Tools:
        deadline, offers = time.monotonic() + self.wait, dict[str, Any]()
        while not offers and time.monotonic() < deadline:
            asked = {
                one: self.client.submit(*packed(tasks.offer, []), workers=[one], pure=False) for one in self.present()
            }
            for address, future in asked.items():
                with suppress(Exception):  # it says nothing, or is gone
                    offers[address] = future.result(timeout=max(deadline - time.monotonic(), 1))["tools"][backend]
            time.sleep(TICK)
        able = Counter(tuple(tools.items()) for _, tools in sorted(offers.items()) if isinstance(tools, dict))
        if not able:
            said = "; ".join(f"{address}: {tools}" for address, tools in offers.items()) or "there are no workers"
            raise ClusterError(f"nobody can build {backend} modules: here {mine}; {said}")
        return dict(able.most_common(1)[0][0])

    def present(self) -> dict[str, int]:
        """The workers that are there -> how many modules each takes at a time."""
        try:
            if self.client.status == "running":
                return dict(self.client.nthreads())
        except (OSError, RuntimeError, ValueError):
            pass
        raise ClusterError(f"the scheduler at {self.address} has gone: what is built stays, start again for the rest")

    def run(
        self, requests: Sequence[Request], watch: Watch, verbose: bool = False, jobs: int | None = None
    ) -> list[Outcome]:
        """Build and publish all requests. One that fails does not stop the others.

        ``jobs``: compilers that a worker runs at once, by default as many as it has CPUs.

        Raises:
            ClusterError: no worker can build what is left, or there is no scheduler any more.
        """
        return _Building(self, requests, watch, verbose, jobs)()


class _Building:
    """One run: ``workers`` by address, ``tasks`` that they have by Dask's future, modules that are ``waiting`` for one."""

    def __init__(
        self, fleet: Fleet, requests: Sequence[Request], watch: Watch, verbose: bool, compilers: int | None
    ) -> None:
        self.fleet, self.requests, self.watch, self.verbose, self.compilers = (
            fleet,
            requests,
            guarded(watch),
            verbose,
            compilers,
        )
        self.outcomes = {one: outcome for one in requests if (outcome := build.reused(one)) is not None}
        self.jobs = {request: Job(request) for request in requests if request not in self.outcomes}
        self.files = {name: sha256 for job in self.jobs.values() for name, sha256 in job.tree.items()}
        self.contents = {name: data for job in self.jobs.values() for name, data in job.contents.items()}
        # Those of most steps first: a long one that is begun last would be waited for alone.
        self.waiting = sorted(self.jobs, key=lambda request: -request.steps)
        self.workers, self.tasks, self.attempts = dict[str, _Worker](), dict[Any, _Task](), Counter[Request]()
        self.ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.progress = Progress(sum(one.steps for one in self.jobs), left=tuple(one.spec.name for one in self.jobs))
        self.timeline, self.lanes = Timeline(time.time(), fleet.address, os.getpid(), 0), dict[tuple[str, int], int]()
        self.since, self.looked = time.monotonic(), 0.0

    def __call__(self) -> list[Outcome]:
        while len(self.outcomes) < len(self.requests):
            if time.monotonic() - self.looked >= TICK:
                self._meet(self.fleet.present())
            self._give()
            with suppress(queue.Empty):
                self._take(self.ended.get(timeout=TICK))
            self.watch(self.progress)
        timeline.keep(self.timeline, workspace())
        return [self.outcomes[request] for request in self.requests]

    def _meet(self, present: dict[str, int]) -> None:
        """Ask whoever is new for its tools; give to others what those had that are gone."""
        self.looked = time.monotonic()
        for address in present.keys() - self.workers.keys():
            self.workers[address] = _Worker(present[address])
            self._send(address, partial(self._asked, address), None, tasks.offer, [*self.contents])
        for future, task in list(self.tasks.items()):
            if task.address not in present:
                self._again(future, task, f"{task.address} was lost")
        for address in self.workers.keys() - present.keys():
            del self.workers[address]

    def _give(self) -> None:
        """Give waiting modules to whoever can build them, one for each of its threads."""
        for request in list(self.waiting):
            able = {at: one.free for at, one in self.workers.items() if request.spec.backend in one.backends}
            if able:
                self.since = time.monotonic()
            if any(able.values()):
                address = max(able, key=able.__getitem__)
                self.waiting.remove(request)
                self.attempts[request] += 1
                message = self.jobs[request].message(digest(self.files)[:32], self.compilers)
                self._send(address, partial(self._made, request, address), request, tasks.make, message)
        building = any(task.request is not None for task in self.tasks.values())
        if self.waiting and not building and time.monotonic() - self.since > self.fleet.wait:
            raise ClusterError(self._why_nobody())

    def _why_nobody(self) -> str:
        names, backends = sorted(one.spec.name for one in self.waiting), {one.spec.backend for one in self.waiting}
        wanted = "; ".join(f"{name}: {described(self.fleet.wanted[name])}" for name in sorted(backends))
        there = "; ".join(f"{at}: {one.why_not or 'does not answer'}" for at, one in self.workers.items())
        return (
            f"no worker that can build {', '.join(names[:4]) + ', ...' * (len(names) > 4)} came within"
            f" {self.fleet.wait:g} s: wanted {wanted}; {there or 'there are no workers'}"
        )

    def _send(self, address: str, then: Callable[[Any], None], request: Request | None, *call: Any) -> None:
        name = f"flashinfer-{request.spec.name if request else call[0].__name__}-{uuid.uuid4().hex[:12]}"
        future = self.fleet.client.submit(*packed(*call), workers=[address], key=name, pure=False)
        self.workers[address].free -= 1
        self.tasks[future] = _Task(address, then, request)
        future.add_done_callback(self.ended.put)

    def _take(self, future: Any) -> None:
        patience, task = 2.0, self.tasks.get(future)
        while task is not None:
            try:
                answer = future.result(timeout=patience)
            except TimeoutError:
                # Its worker went after the end, and Dask waits for one of the same address; or it is a large library.
                patience *= 2
                if task.address in self.fleet.present():
                    continue
                return self._again(future, task, f"{task.address} was lost")
            except Exception as err:  # of another version, or what it has to import is broken
                if task.address in self.fleet.present():
                    self._refuse(task.address, f"failed: {type(err).__name__}: {err}")
                return self._again(future, task, f"{task.address} failed: {err}")
            del self.tasks[future]
            self.workers[task.address].free += 1
            return task.then(answer)

    def _again(self, future: Any, task: _Task, why: str) -> None:
        """Take back what a worker has not done."""
        del self.tasks[future]
        future.cancel()
        self.workers[task.address].free += 1
        if task.request is not None:
            self._retry(task.request, why)

    def _retry(self, request: Request, why: str) -> None:
        if self.attempts[request] < ATTEMPTS:
            self.waiting.append(request)  # last: where workers die one after the other, it is not on each of them
        else:
            self._fail(BuildError(request.spec.name, f"tried {ATTEMPTS} times, the last time: {why}"), request)

    def _refuse(self, address: str, why: str) -> None:
        """Use a worker no more in this run, and say so once."""
        if not self.workers[address].why_not:
            self.workers[address].why_not, self.workers[address].backends = why, ()
            say(f"worker {address} is not used: {why}")

    def _asked(self, address: str, offer: dict[str, Any]) -> None:
        if offer.get("protocol") != PROTOCOL:
            return self._refuse(address, f"speaks protocol {offer.get('protocol')}, wanted {PROTOCOL}")
        others = {backend: tools for backend, tools in self.fleet.wanted.items() if offer["tools"][backend] != tools}
        able = tuple(self.fleet.wanted.keys() - others.keys())
        has = "; ".join(f"{backend}: has {described(offer['tools'][backend])}" for backend in others)
        if not able:
            wanted = "; ".join(f"{backend}: {described(tools)}" for backend, tools in others.items())
            return self._refuse(address, f"{has}; wanted {wanted}")
        if others:
            say(f"worker {address} is used for {' '.join(able)} alone: {has}")
        lacking = {name: self.contents[name] for name in offer["lacks"]}
        self._send(address, partial(self._kept, address, able), None, tasks.keep, lacking, self.files)

    def _kept(self, address: str, able: tuple[str, ...], _: object) -> None:
        self.workers[address].backends = able

    def _made(self, request: Request, address: str, answer: dict[str, Any]) -> None:
        name = request.spec.name
        if self.verbose:
            say(f"{name} on {address}:\n{answer.get('said', '')}")
        if "again" in answer:
            if answer["unfit"]:
                self._refuse(address, answer["again"])
            return self._retry(request, f"{address}: {answer['again']}")
        if "error" in answer:
            return self._fail(self._error(request, answer["error"]), request)
        try:
            artifact = accepted(request, self.jobs[request].fields, answer["manifest"], answer["library"])
        except ArtifactError as err:
            self._refuse(address, f"sent what was not asked for: {err}")
            return self._retry(request, f"{address}: {err}")
        except (OSError, FlashInferError) as err:
            return self._fail(BuildError(name, f"cannot publish at {request.destination}: {err}"), request)
        if answer["timeline"] is not None:
            self._record(address, answer["timeline"])
        if answer["how"] == "built":
            emit("compile", name, ms=artifact.manifest["seconds"] * 1e3)
        self._finish(Outcome(request, answer["how"], artifact, timeline=self.timeline))

    def _fail(self, error: BuildError, request: Request) -> None:
        self._finish(Outcome(request, "failed", error=error, timeline=self.timeline))

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.request] = outcome
        self.progress.done += outcome.request.steps
        self.progress.left = tuple(one.spec.name for one in self.jobs if one not in self.outcomes)

    def _error(self, request: Request, told: dict[str, str]) -> BuildError:
        """The error of a compiler as it would be here; its log lies where that of a build here would."""
        told = {name: unmarked(text, self.jobs[request].places) for name, text in told.items()}
        log = workspace() / "build" / f"{request.build_key[:16]}-cluster" / request.spec.name / "build.log"
        with suppress(OSError):
            write_atomically(log, told["log"].encode())
        return BuildError(request.spec.name, told["reason"], told["command"], told["output"], log)

    def _record(self, address: str, told: dict[str, Any]) -> None:
        """Add what a worker's compilers did to the timeline of all: each slot of each worker is a lane."""
        for unit in (Unit(**one) for one in told["units"]):
            lane = self.lanes.setdefault((address, unit.lane), len(self.lanes))
            self.timeline.units.append(replace(unit, lane=lane))


def accepted(request: Request, fields: dict[str, Any], manifest: dict[str, Any], library: bytes) -> Artifact:
    """Publish what came back as an artifact at its destination, once it is found to be what was asked for.

    Raises:
        ArtifactError: it is not.
        OSError: it cannot be written here.
    """
    name, archs = request.spec.name, [*request.target.archs]
    keys = {"key": request.key, "build_key": request.build_key}
    wanted = {**fields, **keys, "archs": archs, "toolchain": request.toolchain.identity}
    make_directories(request.destination.parent)
    with scratch(request.destination.parent, ".cluster.") as folder:
        place = folder / name
        make_directories(place)
        for file, data in ((f"{name}.so", library), (MANIFEST, json.dumps(manifest).encode())):
            write_atomically(place / file, data)
        found = read(place, name)
        if not isinstance(found, Artifact):
            raise ArtifactError(str(found))
        if differs := [key for key, value in wanted.items() if found.manifest.get(key) != value]:
            raise ArtifactError(f"the manifest of {name!r} says another {' and '.join(differs)}")
        with verified(found):
            return publish(found.path, found.manifest, request.destination)
