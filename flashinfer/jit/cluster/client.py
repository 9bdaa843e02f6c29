"""Client of a Dask scheduler: sends modules to workers, receives their artifacts and publishes them here.

The client keeps the queue, and sends each module to a named worker. A worker is used after it has reported the required
tools and has stored the files. Dask's own queue does not suit: it never moves a waiting task to a worker that becomes
usable later.
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
from .. import history
from ..artifact import MANIFEST, Artifact, publish, read, verified
from ..events import emit
from ..history import Progress, Timeline, Unit, Watch
from ..lookup import BuildRequest
from ..machine.target import Target, narrowed
from ..machine.toolchain import Identity, Toolchain, find_toolchain, find_torch
from ..machine.trust import make_directories
from ..machine.workspace import scratch, workspace, write_atomically
from ..report import guarded, say
from ..resolve import Outcome, reused
from ..spec import Spec, digest
from . import tasks
from .job import PROTOCOL, Job, Tools, dask_task, describe, restore_paths, tools_of

TICK = 0.25  # seconds between two polls of the scheduler's workers
ATTEMPTS = 4  # times that a module may be sent to a worker, as often as Dask retries a task


@dataclass(frozen=True)
class RemoteToolchain(Toolchain):
    """Tools of the workers, for a client without compilers."""

    remote_identity: tuple[tuple[str, str | None], ...] = ()

    @property
    def identity(self) -> Identity:
        return dict(self.remote_identity)


@dataclass
class _Worker:
    """A worker: its free threads, the backends that it can build, or the reason for its exclusion."""

    free: int
    backends: tuple[str, ...] = ()
    exclusion: str = ""


@dataclass(frozen=True)
class _Task:
    """A call that a worker is running, and the function that receives its answer."""

    address: str
    on_result: Callable[[Any], None]
    request: BuildRequest | None = None


class ClusterClient:
    """A connection to a scheduler, and the tools that all workers must have.

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
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # errors are reported once, by this class
        self.address, self.wait = address, wait
        self.required_tools = dict[str, Tools]()
        try:
            self.client: Any = Client(address, timeout=max(wait, 1), set_as_default=False, name="flashinfer")
        except (OSError, RuntimeError, TypeError, ValueError) as err:
            raise ClusterError(f"no scheduler answers at {address} within {wait:.0f} s: {err}") from None

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        # Running tasks then end, because they have no client: see tasks.make.
        with suppress(Exception):
            self.client.close(timeout=5)

    def request(self, spec: Spec, destination: Path, target: Target) -> BuildRequest:
        """Return a build request that uses this machine's tools, or else those that most workers share."""
        target = narrowed(target, spec.archs, spec.name)
        return BuildRequest(spec, target, self._toolchain(spec.backend), spec.key, destination)

    def _toolchain(self, backend: str) -> Toolchain:
        local_tools = tools_of(backend)
        if isinstance(local_tools, dict):
            self.required_tools[backend] = local_tools
            return find_toolchain(backend)
        if backend not in self.required_tools:
            self.required_tools[backend] = self._most_common_tools(backend, local_tools)
            most = describe(self.required_tools[backend])
            say(f"{backend} modules are built by the tools of most workers, {most}: this machine: {local_tools}")
        identity = {name: value for name, value in self.required_tools[backend].items() if name != "torch"}
        return RemoteToolchain("c++", None, "ninja", find_torch(), remote_identity=tuple(identity.items()))

    def _most_common_tools(self, backend: str, local_tools: str) -> Tools:
        deadline, offers = time.monotonic() + self.wait, dict[str, Any]()
        while not offers and time.monotonic() < deadline:
            pending = {
                one: self.client.submit(*dask_task(tasks.offer, []), workers=[one], pure=False)
                for one in self.connected_workers()
            }
            for address, future in pending.items():
                with suppress(Exception):  # the worker does not answer, or is gone
                    offers[address] = future.result(timeout=max(deadline - time.monotonic(), 1))["tools"][backend]
            time.sleep(TICK)
        able = Counter(tuple(tools.items()) for _, tools in sorted(offers.items()) if isinstance(tools, dict))
        if not able:
            remote = "; ".join(f"{address}: {tools}" for address, tools in offers.items()) or "there are no workers"
            raise ClusterError(f"no machine can build {backend} modules: this machine: {local_tools}; {remote}")
        return dict(able.most_common(1)[0][0])

    def connected_workers(self) -> dict[str, int]:
        """Map the address of each connected worker to the number of modules that it builds at a time."""
        try:
            if self.client.status == "running":
                return dict(self.client.nthreads())
        except (OSError, RuntimeError, ValueError):
            pass
        raise ClusterError(
            f"the scheduler at {self.address} is gone: finished modules are published, run again for the rest"
        )

    def run(
        self, requests: Sequence[BuildRequest], watch: Watch, verbose: bool = False, jobs: int | None = None
    ) -> list[Outcome]:
        """Build and publish all requests. A failure does not stop the other builds.

        Args:
            jobs: compilers that a worker runs at once, by default one per CPU.

        Raises:
            ClusterError: no worker can build the remaining modules, or the scheduler is gone.
        """
        return _ClusterBuild(self, requests, watch, verbose, jobs)()


class _ClusterBuild:
    """One run of a cluster build.

    ``workers`` maps addresses to workers, ``tasks`` maps Dask's futures to running calls. ``waiting`` is the queue.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        requests: Sequence[BuildRequest],
        watch: Watch,
        verbose: bool,
        compilers: int | None,
    ) -> None:
        self.cluster, self.requests = cluster, requests
        self.watch = guarded(watch)
        self.verbose, self.compilers = verbose, compilers
        self.outcomes = {one: outcome for one in requests if (outcome := reused(one)) is not None}
        self.jobs = {request: Job(request) for request in requests if request not in self.outcomes}
        self.files = {name: sha256 for job in self.jobs.values() for name, sha256 in job.tree.items()}
        self.contents = {name: data for job in self.jobs.values() for name, data in job.contents.items()}
        # The longest modules start first: a long one that starts last would leave all other workers idle.
        self.waiting = sorted(self.jobs, key=lambda request: -request.steps)
        self.workers, self.tasks = dict[str, _Worker](), dict[Any, _Task]()
        self.attempts = Counter[BuildRequest]()
        self.ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.progress = Progress(sum(one.steps for one in self.jobs), left=tuple(one.spec.name for one in self.jobs))
        self.timeline, self.lanes = Timeline(time.time(), cluster.address, os.getpid(), 0), dict[tuple[str, int], int]()
        self.last_able = time.monotonic()  # the last time at which a worker could build a waiting module
        self.last_poll = 0.0

    def __call__(self) -> list[Outcome]:
        while len(self.outcomes) < len(self.requests):
            if time.monotonic() - self.last_poll >= TICK:
                self._update_workers(self.cluster.connected_workers())
            self._assign()
            with suppress(queue.Empty):
                self._handle_result(self.ended.get(timeout=TICK))
            self.watch(self.progress)
        history.save_timeline(self.timeline, workspace())
        return [self.outcomes[request] for request in self.requests]

    def _update_workers(self, connected_workers: dict[str, int]) -> None:
        """Ask new workers for their tools. Requeue the modules of workers that are gone."""
        self.last_poll = time.monotonic()
        for address in connected_workers.keys() - self.workers.keys():
            self.workers[address] = _Worker(connected_workers[address])
            self._submit(address, partial(self._on_offer, address), None, tasks.offer, [*self.contents])
        for future, task in list(self.tasks.items()):
            if task.address not in connected_workers:
                self._requeue(future, task, f"{task.address} was lost")
        for address in self.workers.keys() - connected_workers.keys():
            del self.workers[address]

    def _assign(self) -> None:
        """Send waiting modules to workers that can build them, one per thread."""
        for request in list(self.waiting):
            able = {at: one.free for at, one in self.workers.items() if request.spec.backend in one.backends}
            if able:
                self.last_able = time.monotonic()
            if any(able.values()):
                address = max(able, key=able.__getitem__)
                self.waiting.remove(request)
                self.attempts[request] += 1
                message = self.jobs[request].message(digest(self.files)[:32], self.compilers)
                self._submit(address, partial(self._on_built, request, address), request, tasks.make, message)
        building = any(task.request is not None for task in self.tasks.values())
        if self.waiting and not building and time.monotonic() - self.last_able > self.cluster.wait:
            raise ClusterError(self._no_worker_text())

    def _no_worker_text(self) -> str:
        names, backends = sorted(one.spec.name for one in self.waiting), {one.spec.backend for one in self.waiting}
        wanted = "; ".join(f"{name}: {describe(self.cluster.required_tools[name])}" for name in sorted(backends))
        got = "; ".join(f"{at}: {one.exclusion or 'does not answer'}" for at, one in self.workers.items())
        return (
            f"no worker could build {', '.join(names[:4]) + ', ...' * (len(names) > 4)} for {self.cluster.wait:g} s:"
            f" wanted {wanted}; {got or 'there are no workers'}"
        )

    def _submit(self, address: str, on_result: Callable[[Any], None], request: BuildRequest | None, *call: Any) -> None:
        name = f"flashinfer-{request.spec.name if request else call[0].__name__}-{uuid.uuid4().hex[:12]}"
        future = self.cluster.client.submit(*dask_task(*call), workers=[address], key=name, pure=False)
        self.workers[address].free -= 1
        self.tasks[future] = _Task(address, on_result, request)
        future.add_done_callback(self.ended.put)

    def _handle_result(self, future: Any) -> None:
        timeout, task = 2.0, self.tasks.get(future)
        while task is not None:
            try:
                answer = future.result(timeout=timeout)
            except TimeoutError:
                # The result does not arrive: the worker died after it finished, or the library is large.
                timeout *= 2
                if task.address in self.cluster.connected_workers():
                    continue
                return self._requeue(future, task, f"{task.address} was lost")
            except Exception as err:  # the worker has another version of this package, or an import fails there
                if task.address in self.cluster.connected_workers():
                    self._exclude(task.address, f"failed: {type(err).__name__}: {err}")
                return self._requeue(future, task, f"{task.address} failed: {err}")
            del self.tasks[future]
            self.workers[task.address].free += 1
            return task.on_result(answer)

    def _requeue(self, future: Any, task: _Task, why: str) -> None:
        """Requeue a module that a worker did not finish."""
        del self.tasks[future]
        future.cancel()
        self.workers[task.address].free += 1
        if task.request is not None:
            self._retry(task.request, why)

    def _retry(self, request: BuildRequest, why: str) -> None:
        if self.attempts[request] < ATTEMPTS:
            self.waiting.append(request)  # at the end: a module that kills workers must not delay the others
        else:
            self._fail(BuildError(request.spec.name, f"failed {ATTEMPTS} times, the last time: {why}"), request)

    def _exclude(self, address: str, why: str) -> None:
        """Exclude a worker from this run and report that once."""
        if not self.workers[address].exclusion:
            self.workers[address].exclusion, self.workers[address].backends = why, ()
            say(f"worker {address} is not used: {why}")

    def _on_offer(self, address: str, offer: dict[str, Any]) -> None:
        if offer.get("protocol") != PROTOCOL:
            return self._exclude(address, f"speaks protocol {offer.get('protocol')}, wanted {PROTOCOL}")
        others = {
            backend: tools for backend, tools in self.cluster.required_tools.items() if offer["tools"][backend] != tools
        }
        able = tuple(self.cluster.required_tools.keys() - others.keys())
        has = "; ".join(f"{backend}: has {describe(offer['tools'][backend])}" for backend in others)
        if not able:
            wanted = "; ".join(f"{backend}: {describe(tools)}" for backend, tools in others.items())
            return self._exclude(address, f"{has}; wanted {wanted}")
        if others:
            say(f"worker {address} is used only for {' '.join(able)}: {has}")
        lacking = {name: self.contents[name] for name in offer["lacks"]}
        self._submit(
            address, partial(self._on_files_stored, address, able), None, tasks.store_tree, lacking, self.files
        )

    def _on_files_stored(self, address: str, able: tuple[str, ...], _: object) -> None:
        self.workers[address].backends = able

    def _on_built(self, request: BuildRequest, address: str, answer: dict[str, Any]) -> None:
        name = request.spec.name
        if self.verbose:
            say(f"{name} on {address}:\n{answer.get('said', '')}")
        if "again" in answer:
            if answer["unfit"]:
                self._exclude(address, answer["again"])
            return self._retry(request, f"{address}: {answer['again']}")
        if "error" in answer:
            return self._fail(self._error(request, answer["error"]), request)
        try:
            artifact = publish_result(request, self.jobs[request].fields, answer["manifest"], answer["library"])
        except ArtifactError as err:
            self._exclude(address, f"sent an invalid artifact: {err}")
            return self._retry(request, f"{address}: {err}")
        except (OSError, FlashInferError) as err:
            return self._fail(BuildError(name, f"cannot publish at {request.destination}: {err}"), request)
        if answer["timeline"] is not None:
            self._record(address, answer["timeline"])
        if answer["how"] == "built":
            emit("compile", name, ms=artifact.manifest["seconds"] * 1e3)
        self._finish(request, Outcome(request, answer["how"], artifact, timeline=self.timeline))

    def _fail(self, error: BuildError, request: BuildRequest) -> None:
        self._finish(request, Outcome(request, "failed", error=error, timeline=self.timeline))

    def _finish(self, request: BuildRequest, outcome: Outcome) -> None:
        self.outcomes[request] = outcome
        self.progress.done += request.steps
        self.progress.left = tuple(one.spec.name for one in self.jobs if one not in self.outcomes)

    def _error(self, request: BuildRequest, message: dict[str, str]) -> BuildError:
        """Return a compiler's error with paths of this machine, and write its log to the workspace."""
        message = {name: restore_paths(text, self.jobs[request].paths) for name, text in message.items()}
        log = workspace() / "build" / f"{request.build_key[:16]}-cluster" / request.spec.name / "build.log"
        with suppress(OSError):
            write_atomically(log, message["log"].encode())
        return BuildError(request.spec.name, message["reason"], message["command"], message["output"], log)

    def _record(self, address: str, message: dict[str, Any]) -> None:
        """Add a worker's compile steps to the timeline. Each slot of each worker is a lane."""
        for unit in (Unit(**one) for one in message["units"]):
            lane = self.lanes.setdefault((address, unit.lane), len(self.lanes))
            self.timeline.units.append(replace(unit, lane=lane))


def publish_result(request: BuildRequest, fields: dict[str, Any], manifest: dict[str, Any], library: bytes) -> Artifact:
    """Check the artifact that a worker sent, and publish it at its destination.

    Raises:
        ArtifactError: the artifact does not answer the request.
        OSError: it cannot be written here.
    """
    name, archs = request.spec.name, [*request.target.archs]
    keys = {"key": request.key, "build_key": request.build_key}
    wanted = {**fields, **keys, "archs": archs, "toolchain": request.identity}
    make_directories(request.destination.parent)
    with scratch(request.destination.parent, ".cluster.") as folder:
        directory = folder / name
        make_directories(directory)
        for file, data in ((f"{name}.so", library), (MANIFEST, json.dumps(manifest).encode())):
            write_atomically(directory / file, data)
        found = read(directory, name)
        if not isinstance(found, Artifact):
            raise ArtifactError(str(found))
        if differs := [key for key, value in wanted.items() if found.manifest.get(key) != value]:
            raise ArtifactError(f"the manifest of {name!r} has another {' and '.join(differs)}")
        with verified(found):
            return publish(found.path, found.manifest, request.destination)
