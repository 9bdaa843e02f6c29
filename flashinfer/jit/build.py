"""Builds what is missing: locks, one ninja run over one graph, checks, publishes.

The same path serves one module at run time and a whole matrix from ``scripts/build_aot.py``; they differ in the
list of requests and in where the artifacts go.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .. import env
from ..errors import BuildError, FlashInferError, JitDisabledError
from . import store
from .events import emit, say
from .lock import held
from .ninja import render_graph, render_spec, units
from .spec import JitSpec
from .store import Artifact
from .target import Target, wanted_target
from .template import render_config
from .toolchain import Toolchain, find_toolchain
from .workspace import roots, workspace, write_atomically

# Variables that would make a compiler read or do what no key knows of; FLASHINFER_EXTRA_* is the way to say so.
_UNKEYED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@dataclass(frozen=True)
class Request:
    """A module to build for a target, and the directory to publish it at (by default its place in the workspace)."""

    spec: JitSpec
    target: Target
    toolchain: Toolchain
    key: str
    destination: Path

    @cached_property
    def build_key(self) -> str:
        return store.build_key(self.key, self.target, self.toolchain.identity)

    @property
    def directory(self) -> str:
        """Where the module is built, relative to the build directory: private to exactly this build."""
        return f"{self.build_key[:16]}/{self.spec.name}"


@dataclass(frozen=True)
class Outcome:
    """What became of a request. ``how``: ``built``, ``reused`` or ``failed``."""

    request: Request
    how: str
    artifact: Artifact | None = None
    error: BuildError | None = None


@dataclass
class Progress:
    """What a display shows: edges done of all, modules not finished yet, when it began."""

    total: int = 0
    done: int = 0
    left: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)


Watch = Callable[[Progress], None]


def make_request(spec: JitSpec, destination: Path | None = None, target: Target | None = None) -> Request:
    """Say what building ``spec`` here and now means: for what, by which tools, to be published where.

    Raises:
        ToolchainError: a tool is missing, or nothing says what to compile for.
    """
    target, toolchain, key = target or wanted_target(spec.backend), find_toolchain(spec.backend), spec.key
    if destination is None:
        place = store.workspace_directory(workspace(), spec, key)
        destination = place / store.build_key(key, target, toolchain.identity)[:32]
    return Request(spec, target, toolchain, key, destination)


def build_jit_specs(specs: Sequence[JitSpec], verbose: bool = False, skip_prebuilt: bool = True) -> list[Artifact]:
    """Artifacts of all specs, building those that are missing in one parallel run.

    Args:
        specs: modules, in any number.
        verbose: show every command and its output.
        skip_prebuilt: take artifacts of AOT directories as they are; ``False`` builds those too.

    Raises:
        BuildError: a module did not build (the first of them; the others are built all the same).
        JitDisabledError, ToolchainError: something is missing and nothing may, or can, build it.
    """
    found: dict[JitSpec, Artifact] = {}
    missing: list[Request] = []
    for spec in dict.fromkeys(specs):
        lookup = store.find(spec)
        if lookup.artifact is not None and (skip_prebuilt or not _is_prebuilt(lookup.artifact)):
            emit("hit", spec.name, path=lookup.artifact.path)
            found[spec] = lookup.artifact
            continue
        emit("miss", spec.name, reason=lookup.reason)
        if env.DISABLE_JIT.get():
            raise JitDisabledError(
                f"module {spec.name!r} is not built and FLASHINFER_DISABLE_JIT is set; looked in "
                f"{', '.join(str(path) for path in (*env.aot_dirs(), env.WORKSPACE_DIR.get()))}: {lookup.reason}"
            )
        missing.append(make_request(spec))
    for outcome in run(missing, verbose=verbose):
        if outcome.error is not None:
            raise outcome.error
        assert outcome.artifact is not None
        found[outcome.request.spec] = outcome.artifact
    return [found[spec] for spec in specs]


def _is_prebuilt(artifact: Artifact) -> bool:
    return any(artifact.path.is_relative_to(directory) for directory in env.aot_dirs())


def run(
    requests: Sequence[Request], verbose: bool = False, jobs: int | None = None, watch: Watch | None = None
) -> list[Outcome]:
    """Build and publish all requests in one ninja run. One that fails does not stop the others."""
    if not requests:
        return []
    outcomes: dict[Request, Outcome] = {}
    root = workspace()
    with ExitStack() as stack:
        locks = {r: stack.enter_context(held(root / "locks" / f"{r.build_key[:16]}.lock", r.spec.name))
                 for r in sorted(requests, key=lambda request: request.build_key)}  # fmt: skip
        for request in requests:
            already = finished(request)
            if already is not None:
                if already.directory != request.destination:
                    already = store.publish(already.path, already.manifest, request.destination)
                outcomes[request] = Outcome(request, "reused", already)
        todo = [request for request in requests if request not in outcomes]
        if todo:
            if watch is None:
                files = sum(len(request.spec.sources) for request in todo)
                names = ", ".join(request.spec.name for request in todo)
                say(f"building {names} ({files} source files) in {root / 'build' / todo[0].directory}")
            ninja = _Run(todo, outcomes, lambda request: locks[request].release())
            ninja(verbose or env.JIT_VERBOSE.get(), jobs or env.MAX_JOBS.get(), watch)
    return [outcomes[request] for request in requests]


def finished(request: Request) -> Artifact | None:
    """The very artifact that the request would give: at its destination, or in the workspace to be copied there."""
    in_workspace = [
        store.workspace_directory(root, request.spec, request.key) / request.build_key[:32] for root in roots()
    ]
    for place in dict.fromkeys([request.destination, *in_workspace]):
        found = store.read(place, request.spec.name)
        if (
            isinstance(found, Artifact)
            and found.manifest["build_key"] == request.build_key
            and store.file_digest(found.path) == found.manifest["sha256"]
        ):
            return found
    return None


class _Run:
    """One ninja process over one graph; calling it fills ``outcomes`` and lets go of each request's lock."""

    def __init__(
        self, todo: list[Request], outcomes: dict[Request, Outcome], release: Callable[[Request], None]
    ) -> None:
        self.folder, self.todo, self.outcomes, self.release = workspace() / "build", todo, outcomes, release
        self.by_module = {request.spec.name: request for request in todo}
        if len(self.by_module) != len(todo):
            raise ValueError("requests: got two modules of one name, wanted distinct names")
        self.logs: dict[str, list[str]] = {name: [] for name in ("", *self.by_module)}
        self.progress = Progress(total=sum(len(request.spec.sources) + 1 for request in todo))

    def __call__(self, verbose: bool, jobs: int, watch: Watch | None) -> None:
        toolchain = max((request.toolchain for request in self.todo), key=lambda tools: tools.nvcc is not None)
        graph = self._write(toolchain)
        command = [toolchain.ninja, "-C", str(self.folder), "-f", graph, "-j", str(jobs), "-k", "0"]
        environment = {name: value for name, value in os.environ.items() if name not in _UNKEYED}
        environment |= {"NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **pipes, text=True, errors="replace", env=environment) as process:  # type: ignore[call-overload]
            try:
                module = ""
                for line in process.stdout:
                    if verbose:
                        say(line.rstrip())
                    module = self._take(line.rstrip(), module, watch)
            except BaseException:
                process.terminate()
                raise
        for request in self.todo:
            if request not in self.outcomes:
                self._finish(request, Outcome(request, "failed", error=self._error(request, command)))

    def _write(self, toolchain: Toolchain) -> str:
        """Write the graph, the spec files and the configuration headers; the name of the graph's file."""
        for request in self.todo:
            place = self.folder / request.directory
            (place / f"{request.spec.name}.so").unlink(missing_ok=True)
            text = render_spec(request.spec, request.target, request.toolchain, request.directory)
            write_atomically(place / "build.ninja", text.encode())
            if request.spec.template:
                header, config = place / request.spec.config_header, render_config(request.spec).encode()
                # Left alone where it is right: a resumed build then compiles only what is missing.
                if not header.exists() or header.read_bytes() != config:
                    write_atomically(header, config)
        graph = f"{self.todo[0].directory}/graph.ninja"
        text = render_graph({request.directory: request.spec for request in self.todo}, toolchain)
        write_atomically(self.folder / graph, text.encode())
        return graph

    def _take(self, line: str, module: str, watch: Watch | None) -> str:
        """One line of ninja's output. A status line names the module that it and the lines after it belong to."""
        status = re.match(r"\[(\d+)/(\d+)\] (\S+)", line)
        if status is not None:
            module = status[3] if status[3] in self.by_module else ""
        if line:
            self.logs[module].append(line)
        if status is not None and module:
            request = self.by_module[module]
            made = f"{request.directory}/{module}.so"
            library = self.folder / made
            # Removed before the run, and by a linker that fails: where it is there, this run has linked it. It is there
            # while the linker writes it, too, when the line of a compiler's end is read late.
            if made in line and library.exists() and request not in self.outcomes:
                self._finish(request, self._publish(request, library))
        if status is not None and watch is not None:
            self.progress.done, self.progress.total = int(status[1]), int(status[2])
            self.progress.left = tuple(request.spec.name for request in self.todo if request not in self.outcomes)
            watch(self.progress)
        return module

    def _finish(self, request: Request, outcome: Outcome) -> None:
        self.outcomes[request] = outcome
        self.release(request)

    def _publish(self, request: Request, library: Path) -> Outcome:
        spec, seconds = request.spec, self._compile_seconds(request)
        try:
            check_dependencies(spec, self.folder, request.directory)
            if spec.key != request.key:
                raise BuildError(spec.name, "a source or header changed while it was compiled; build again")
            manifest = store.make_manifest(
                spec, request.key, request.target, request.toolchain, library, time.time(), seconds
            )
            artifact = store.publish(library, manifest, request.destination)
        except BuildError as err:
            return Outcome(request, "failed", error=err)
        except (OSError, FlashInferError) as err:
            reason = f"cannot publish at {request.destination}: {err}"
            return Outcome(request, "failed", error=BuildError(spec.name, reason))
        emit("compile", spec.name, seconds=seconds)
        shutil.rmtree(library.parent.parent, ignore_errors=True)
        return Outcome(request, "built", artifact)

    def _compile_seconds(self, request: Request) -> float:
        """What ninja's log says the module's files took, added up."""
        took, text = {}, ""
        with suppress(OSError):
            text = (self.folder / ".ninja_log").read_text()
        for line in text.splitlines():
            entry = line.split("\t")
            if len(entry) == 5 and entry[3].startswith(request.directory):
                took[entry[3]] = int(entry[1]) - int(entry[0])
        return round(sum(took.values()) / 1000, 3)

    def _error(self, request: Request, command: list[str]) -> BuildError:
        """What a person needs of the output: the failed command and the compiler's words from the first error on."""
        name, lines = request.spec.name, self.logs[request.spec.name] or self.logs[""]
        log = self.folder / request.directory / "build.log"
        write_atomically(log, "\n".join(lines).encode() + b"\n")
        failed = next((number for number, line in enumerate(lines) if line.startswith("FAILED:")), None)
        output = lines if failed is None else lines[failed + 2 :]
        first = _first_error(output)
        text = "\n".join(output[output.index(first) :] if first in output else output)
        return BuildError(
            name, first or "ninja failed", " ".join(command) if failed is None else lines[failed + 1], text, log
        )


def _first_error(lines: Iterable[str]) -> str:
    ordered = [line for line in lines if line.strip()]
    pattern = re.compile(r"\berror\b[: #]|undefined reference|fatal|cannot find", re.IGNORECASE)
    return next((line for line in ordered if pattern.search(line)), ordered[0] if ordered else "")


def check_dependencies(spec: JitSpec, folder: Path, directory: str) -> None:
    """Every own header that the compiler says it read must be one that the key covers.

    Raises:
        BuildError: one is not, for example because its name in the ``#include`` is a macro.
    """
    covered = {os.path.realpath(path) for path in store.covered_files(spec)}
    own = [os.path.realpath(path) for path in (*map(os.path.dirname, spec.source_paths()), *spec.include_dirs)]
    for _, _, made in units(spec, directory):
        for name in read_depfile((folder / f"{made}.d").read_text()):
            path = os.path.realpath(folder / name)
            if path == os.path.realpath(folder / directory / spec.config_header) or path in covered:
                continue
            if any(path.startswith(root + os.sep) for root in own):
                raise BuildError(
                    spec.name,
                    f"error: the compiler read {path}, which the module's key does not cover: include it by a plain"
                    ' #include "name" so that a change of it is noticed',
                )


def read_depfile(text: str) -> list[str]:
    """The prerequisites in a depfile of gcc or nvcc, unescaped."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|[^\s\\])+", names)]
