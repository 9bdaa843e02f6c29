"""Builds: one ninja run over one graph. Each module is checked and published right after its link."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path

from .. import env
from ..errors import BuildError, FlashInferError, ToolchainError, WorkspaceBuildError
from . import process
from .artifact import Artifact, build_key, elf_requirements, publish
from .events import emit
from .history import (
    LINK,
    ConsoleProgress,
    Past,
    Progress,
    Timeline,
    Unit,
    Watch,
    compilers,
    expected_memory,
    past_of,
    remember,
    save_timeline,
)
from .lock import Hold, runtime_directory
from .lookup import BuildRequest, Rejected, Request, workspace_directory
from .machine.target import Target, narrowed, wanted_target
from .machine.toolchain import Toolchain, compiler_environment, find_python, find_toolchain
from .machine.trust import make_directories
from .machine.workspace import roots, workspace, write_atomically
from .ninja import is_plain, links, objects, render_config, render_graph, render_spec
from .report import guarded, say
from .spec import Spec, closure, digest
from .worker import RUN, UNIT, file_digest, is_held, is_up_to_date, read_depfile, read_note_at

# tempfile takes a lock in its first call. A fork meanwhile would leave it locked in the child. So make that call here.
# It fails and creates nothing.
with process.without_forks(), suppress(OSError):
    tempfile.mkdtemp(dir=os.devnull)

TICK = 1000  # milliseconds without output after which the display is updated anyway
SETTLE = 1.0  # seconds to wait for a killed builder's compilers before building in another directory


def make_request(
    spec: Spec, destination: Path | None = None, target: Target | None = None, key: str | None = None
) -> BuildRequest:
    """Return a request to build ``spec`` on this machine. ``target`` is narrowed to the archs of the module's kernels.

    ``key``: the key of the spec, if it is known.

    Raises:
        ToolchainError: a tool is missing, no target is known, or the module has no kernels for the target. The text
            names the module.
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
    return BuildRequest(spec, target, toolchain, key, destination)


def copy_to_destination(found: Artifact, request: BuildRequest) -> Artifact | Rejected:
    """Copy an artifact to the destination of a request. Do nothing if it is there already."""
    if found.directory == request.destination:
        return found
    try:
        return publish(found.path, found.manifest, request.destination)
    except (OSError, FlashInferError) as err:
        what = f"cannot publish at {request.destination}"
        return Rejected(error=failure(request.spec.name, what, err, roots()[-1]))


class Session:
    """State of one call of ``resolve``: the locks that it holds, its options, and the timeline of all its runs."""

    def __init__(self, verbose: bool, jobs: int | None, watch: Watch | None) -> None:
        self.root, self.holds = workspace(), dict[Request, Hold]()
        self.verbose, self.watch, self.retried = verbose or env.JIT_VERBOSE.get(), watch, set[Request]()
        self.timeline = Timeline(time.time(), os.uname().nodename, os.getpid(), compilers(jobs))

    def build(self, holds: Mapping[BuildRequest, Hold]) -> Iterator[tuple[BuildRequest, Artifact | Rejected]]:
        """Build modules in one run and yield their answers.

        If files of a build were removed meanwhile, its first failure yields no answer. The caller then retries the
        build.
        """
        run = Run(holds, self.root, self.timeline)
        directory = run.folder / run.directory(next(iter(holds)))
        try:
            run(self.verbose, self.watch or ConsoleProgress([request.spec for request in holds], str(directory)))
        except OSError as err:
            for request in holds:
                error = failure(request.spec.name, "cannot build", err, self.root)
                run.answers.setdefault(request, Rejected(error=error))
            self.retried.update(holds)
        save_timeline(self.timeline, self.root)
        for request, answer in run.answers.items():
            if isinstance(answer, Rejected) and run.is_lost(request) and request not in self.retried:
                self.retried.add(request)
            else:
                yield request, answer


@dataclass
class _UnitOutput:
    """Output of one unit: its command, the lines of its compiler, and its exit code after its end."""

    command: str = ""
    lines: list[str] = field(default_factory=list)
    code: int | None = None


class Run:
    """One run of ninja over requests whose locks are held. A call fills ``answers`` and releases each lock."""

    def __init__(self, holds: Mapping[BuildRequest, Hold], root: Path, timeline: Timeline) -> None:
        self.holds, self.timeline = holds, timeline
        self.root, self.folder = root, root / "build"
        self.answers = dict[BuildRequest, Artifact | Rejected]()
        self.ninja_lines: list[str] = []  # output of ninja itself
        self.linked = dict[str, str]()  # symbolic link in the build directory -> its folder, which messages name
        # Request -> output file -> output.
        self.units: dict[BuildRequest, dict[str, _UnitOutput]] = {request: {} for request in holds}
        self.progress = Progress(sum(one.steps for one in holds), left=tuple(one.spec.name for one in holds))
        self.started = time.time()
        self.worker = [find_python(), "-I", "-S", str(Path(__file__).with_name("worker") / "__main__.py")]
        for request in holds:
            self._wait_for_orphaned_compilers(request)

    def directory(self, request: BuildRequest) -> str:
        """Return the directory of a module's build, relative to ``folder``. Only the holder of the lock writes it."""
        return f"{request.build_key[:16]}-{self.holds[request].token}/{request.spec.name}"

    def _wait_for_orphaned_compilers(self, request: BuildRequest) -> None:
        """Wait for the compilers of a killed builder. If they do not end soon, build in another directory."""
        deadline = time.monotonic() + SETTLE
        while is_held(self.folder / self.directory(request) / RUN):
            if time.monotonic() >= deadline:
                self.holds[request].renew()
            time.sleep(0.01)

    def is_lost(self, request: BuildRequest) -> bool:
        """Return whether the build directory was removed meanwhile, for example by ``clear_cache_dir()``."""
        return not (self.folder / self.directory(request) / RUN).exists()

    def __call__(self, verbose: bool, watch: Watch) -> None:
        toolchain = max((request.toolchain for request in self.holds), key=lambda tools: tools.nvcc is not None)
        # Worker processes hold the other side of this pipe. When this process exits, its side closes, and the workers
        # exit at once.
        child_end, own_end = process.pipe()
        try:
            graph = self._write(child_end, toolchain)
            command = [toolchain.ninja, "-C", str(self.folder), "-f", graph, "-k", "0"]
            command += ["-j", str(min(self.timeline.jobs, self.progress.total))]
            with self._start(command, child_end) as ninja:
                try:
                    self._follow(ninja, verbose, guarded(watch))
                except BaseException:
                    own_end.close()
                    ninja.terminate()
                    raise
        finally:
            own_end.close()
            os.close(child_end)
        for request in self.holds:
            if request not in self.answers:
                self._record(request)
                self._finish(request, Rejected(error=self._error(request, command, ninja.returncode)))

    def _start(self, command: list[str], child_end: int) -> subprocess.Popen[bytes]:
        environment = {**compiler_environment(self.folder), "NINJA_STATUS": ""}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # Libraries compiled now are loaded later, so nobody else may write them.
        return process.start(command, **pipes, env=environment, pass_fds=[child_end], umask=0o022)

    def _write(self, alive_pipe: int, toolchain: Toolchain) -> str:
        """Write the graph, and per module its ninja file, configuration header and unit parameters."""
        # Remove ninja's log: each unit decides by its own record whether its object is up to date.
        run_directory = self.directory(next(iter(self.holds)))
        for name in (".ninja_log", ".ninja_deps"):
            (self.folder / run_directory / name).unlink(missing_ok=True)
        slots = runtime_directory() or self.folder / run_directory  # the fallback limits only this build
        for request in self.holds:
            spec, directory = request.spec, self.directory(request)
            path = self.folder / directory
            (path / f"{spec.name}.so").unlink(missing_ok=True)
            for folder, link in links(spec).items():
                _link(folder, path / link)
                self.linked[f"{directory}/{link}"] = folder
            text = render_spec(spec, request.target, directory, links(spec), os.path.realpath(self.folder))
            write_atomically(path / "build.ninja", os.fsencode(text))
            if spec.template:
                write_atomically(path / spec.config_header, render_config(spec).encode())
            past = past_of(spec.name)
            outputs = self._output_names(request).items()
            expected = {Path(file).name: expected_memory(past, source) for file, source in outputs}
            run = {"alive": alive_pipe, "slots": str(slots / "slots"), "limit": self.timeline.jobs}
            write_atomically(path / RUN, json.dumps({**run, "expected": expected}).encode())
        modules = {self.directory(request): request.spec for request in self.holds}
        toolchain = replace(
            toolchain,
            cxx=self._plain_path(toolchain.cxx, run_directory, "cxx"),
            nvcc=toolchain.nvcc and self._plain_path(toolchain.nvcc, run_directory, "nvcc"),
            torch_dir=Path(self._plain_path(f"{toolchain.torch_dir}/", run_directory, "torch")),
        )
        text = render_graph(modules, toolchain, self.worker, run_directory)
        write_atomically(self.folder / run_directory / "graph.ninja", os.fsencode(text))
        return f"{run_directory}/graph.ninja"

    def _plain_path(self, path: str, run_directory: str, name: str) -> str:
        """Return a path without special characters: ``path``, or a path through a link to its folder."""
        if is_plain(path):
            return path
        folder, file = os.path.split(path)
        _link(folder, self.folder / run_directory / f"{name}.folder")
        self.linked[f"{run_directory}/{name}.folder"] = folder
        return f"{run_directory}/{name}.folder/{file}"

    def _follow(self, ninja: subprocess.Popen[bytes], verbose: bool, watch: Watch) -> None:
        # Remove the worker from every command, so that a user can run the command in the build directory.
        prefix = re.compile(rf"exec {re.escape(shlex.join(self.worker))} .*? -- ")
        requests = {self.directory(request): request for request in self.holds}
        lines = self.ninja_lines
        for line in _lines(ninja):
            if line.startswith(UNIT):
                message = json.loads(line.removeprefix(UNIT))
                request = requests[os.path.dirname(message["file"])]
                unit = self.units[request].setdefault(message["file"], _UnitOutput())
                lines = unit.lines
                if "code" in message:
                    lines, unit.code = self.ninja_lines, message["code"]
                    self._unit_ended(request, message["file"], unit.code)
                else:
                    unit.command = shlex.join(message["command"])
            elif line:
                for link, folder in self.linked.items():
                    line = line.replace(link, folder)
                lines.append(prefix.sub("", line))
                if verbose:
                    say(lines[-1])
            watch(self.progress)

    def _unit_ended(self, request: BuildRequest, file: str, code: int) -> None:
        self.progress.done += 1
        ended = sum(unit.code is not None for unit in self.units[request].values())
        self.holds[request].update_note(done=ended, total=request.steps)
        if code == 0 and file.endswith(f"/{request.spec.name}.so"):
            self._finish(request, self._publish(request, self.folder / file))

    def _finish(self, request: BuildRequest, answer: Artifact | Rejected) -> None:
        self.answers[request] = answer
        self.progress.left = tuple(other.spec.name for other in self.holds if other not in self.answers)
        # A killed unit may have left a compiler that still writes. The next holder gets the same directory, and waits.
        hold = self.holds[request]
        hold.release() if isinstance(answer, Artifact) else hold.abandon()

    def _publish(self, request: BuildRequest, library: Path) -> Artifact | Rejected:
        """Publish a linked library. Return its artifact or the error."""
        spec, directory = request.spec, self.directory(request)
        past = self._record(request)
        seconds = round(sum(one.seconds for one in past.values()), 3)
        try:
            check_dependencies(spec, self.folder, directory)
            fields, sha256 = spec.fields(), file_digest(library)
            up_to_date = all(is_up_to_date(file, str(self.folder)) for file in objects(spec, directory))
            recorded = read_note_at(f"{library}.json").get("object")
            if digest(fields) != request.key or not up_to_date or sha256 != recorded:
                raise BuildError(spec.name, "a source, a header or an object changed during the build; build again")
            manifest = {
                **fields,
                "key": request.key,
                "build_key": request.build_key,
                "archs": list(request.target.archs),
                "toolchain": request.identity,
                "requires": elf_requirements(library),
                "sha256": sha256,
                "size": library.stat().st_size,
                "built": round(time.time()),
                "seconds": seconds,
            }
        except BuildError as err:
            return Rejected(error=err)
        except (OSError, ValueError, FlashInferError) as err:  # a source was removed, for example
            return Rejected(error=failure(spec.name, "the library cannot be checked", err, self.root))
        try:
            artifact = publish(library, manifest, request.destination)
        except (OSError, FlashInferError) as err:
            return Rejected(error=failure(spec.name, f"cannot publish at {request.destination}", err, self.root))
        emit("compile", spec.name, ms=seconds * 1e3)
        remember(spec.name, past)
        shutil.rmtree(library.parent.parent, ignore_errors=True)
        return artifact

    def _output_names(self, request: BuildRequest) -> dict[str, str]:
        """Return, for each output file of a module's units (relative to ``folder``), its name in the history."""
        directory = self.directory(request)
        return {**objects(request.spec, directory), f"{directory}/{request.spec.name}.so": LINK}

    def _record(self, request: BuildRequest) -> dict[str, Past]:
        """Add the units' records to the timeline. Return the time and memory of each file."""
        past: dict[str, Past] = {}
        for file, source in self._output_names(request).items():
            record = read_note_at(f"{self.folder / file}.json")
            with suppress(KeyError, TypeError):
                queued, start, end, peak = (record[name] for name in ("queued", "start", "end", "peak"))
                past[source] = Past(round(end - start, 3), peak)
                kind = "link" if source == LINK else "compile"
                unit = Unit(kind, request.spec.name, Path(file).name, source, start, end, record["slot"], peak)
                if end < self.started:
                    unit = replace(unit, kind="reuse", start=self.started, end=self.started)
                elif start - queued > 0.1:
                    self.timeline.units.append(replace(unit, kind="wait", start=queued, end=start, peak_rss_bytes=0))
                self.timeline.units.append(unit)
        return past

    def _error(self, request: BuildRequest, command: list[str], status: int) -> BuildError:
        """Return the error of a build: the failed command, and the output from the first error on."""
        name, log = request.spec.name, self.folder / self.directory(request) / "build.log"
        units = [unit for unit in self.units[request].values() if unit.command]
        with suppress(OSError):
            everything = [line for unit in units for line in (unit.command, *unit.lines)] or self.ninja_lines
            write_atomically(log, os.fsencode("\n".join(everything)) + b"\n")
        failed = next((unit for unit in units if unit.code), _UnitOutput(" ".join(command), self.ninja_lines))
        messages = _from_first_error(failed.lines)
        reason = messages[0] if messages else "no output"
        if failed.code is None:  # a unit or ninja was killed before it could report
            ended = messages[0] if messages else f"ninja ended with {status}"
            reason = f"ninja was killed by signal {-status}" if status < 0 else ended
        return BuildError(name, reason, failed.command, "\n".join(messages), log)


def _link(folder: str, link: Path) -> None:
    """Make a link to a folder. Replace an existing link, which an interrupted build may have left."""
    make_directories(link.parent)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def failure(name: str, what: str, err: Exception, root: Path) -> BuildError:
    """Return the error of a build that ended with ``err``.

    It is a :class:`WorkspaceBuildError` if the failed path is below ``root``.
    """
    names = [getattr(err, attribute, None) for attribute in ("filename", "filename2")]
    paths = [Path(os.fsdecode(one)) for one in names if isinstance(one, (str, bytes, os.PathLike))]
    kind = WorkspaceBuildError if any(path.is_relative_to(root) for path in paths) else BuildError
    return kind(name, f"{what}: {err}")


def _lines(ninja: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield lines of output, and an empty line after each ``TICK`` without output and at the end."""
    assert ninja.stdout is not None
    poller, rest = select.poll(), b""
    poller.register(ninja.stdout, select.POLLIN)
    while True:
        if not poller.poll(TICK):
            yield ""
            continue
        data = os.read(ninja.stdout.fileno(), 65536)
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace").rstrip() for line in (lines if data else [rest]))
        if not data:
            return


def _from_first_error(lines: list[str]) -> list[str]:
    """Return the lines from the first error on, or from the first non-empty line if no line has an error."""
    pattern = re.compile(r"\berror\b[: #]|undefined reference|fatal|cannot find", re.IGNORECASE)
    from_error = list(dropwhile(lambda line: not pattern.search(line), lines))
    return from_error or list(dropwhile(lambda line: not line.strip(), lines))


def check_dependencies(spec: Spec, folder: Path, directory: str) -> None:
    """Check that the key covers every header that the compiler read, except those of the system and of tools.

    Raises:
        BuildError: it does not cover one, for example because the ``#include`` names a macro.
    """
    known = [*closure(spec.scan_roots(), spec.include_dirs), f"{folder}/{directory}/{spec.config_header}"]
    texts = [os.fsdecode((folder / f"{file}.d").read_bytes()) for file in objects(spec, directory)]
    read = {os.path.realpath(folder / name) for text in texts for name in read_depfile(text)}
    roots = [os.path.realpath(path) for path in (*map(os.path.dirname, spec.source_paths()), *spec.include_dirs)]
    for path in sorted(read - {os.path.realpath(path) for path in known}):
        if any(path.startswith(root + os.sep) for root in roots):
            raise BuildError(
                spec.name,
                f"error: the compiler read {path}, which the module's key does not cover: include it by a plain"
                ' #include "name" so that a change of it is noticed',
            )
