"""Builds modules ahead of time into data/aot, in one ninja run over the graph that the JIT uses too.

    python scripts/build_aot.py                                   # every CPU module, and CUDA for the visible GPUs
    python scripts/build_aot.py --backend cuda --cuda-arch "9.0a 8.0"     # CUDA without a GPU
    python scripts/build_aot.py --dry-run                         # what would be built, and why
    python scripts/build_aot.py --specs specs.jsonl               # exactly what `python -m flashinfer trace` recorded

Modules that are up to date are left alone; nothing is compiled twice. Does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..errors import FlashInferError, ToolchainError
from ..jit import build
from ..jit.artifact import Artifact, read
from ..jit.host.progress import Progress
from ..jit.machine.target import CPU_LEVELS, Target, narrowed, native_level, visible_gpus, wanted_target
from ..jit.machine.workspace import workspace
from ..jit.modules import Matrix, Values, axes, families, matrix_specs, some_of
from ..jit.run import Outcome, Request
from ..jit.spec import BACKENDS, Spec
from ..jit.specfile import Asked, one_per_name
from .report import write_report
from .usage import UsageError, asked_in, cuda_archs, of
from .why import differences

CROSS_BUILD = (
    "CUDA modules were left out: no GPU is visible. To build them here, name the archs:"
    ' python scripts/build_aot.py --cuda-arch "9.0a 8.0"'
)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a positive number")
    return int(text)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--backend",
        type=of(some_of(*BACKENDS)),
        metavar="LIST",
        help="cpu, cuda or both; by default cpu, and cuda where it can be",
    )
    add(
        "--cuda-arch",
        type=cuda_archs,
        metavar="LIST",
        help='GPU archs, such as "9.0a 8.0+PTX"; by default the visible GPUs',
    )
    add("--cpu-arch", choices=("native", *CPU_LEVELS), default=None, help="CPU level; by default native")
    for axis in axes():
        text = f"{axis.help}; by default {','.join(axis.default)}"
        add(axis.option, dest=axis.name, type=of(axis.parse), metavar="LIST", help=text)
    add(
        "--families",
        type=of(some_of(*families())),
        default=(),
        metavar="LIST",
        help=f"by default {','.join(families())}",
    )
    add(
        "--specs",
        type=Path,
        metavar="FILE",
        help="what `python -m flashinfer trace` wrote, for the archs in it unless others are named",
    )
    add("--out-dir", type=Path, default=env.default_aot_dir(), metavar="DIR", help="by default data/aot")
    add("--jobs", type=positive, metavar="N", help="compilers at once; by default MAX_JOBS or the CPUs at hand")
    add("--dry-run", action="store_true", help="print what would be built and why, build nothing")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the table as JSON to FILE (- or nothing: standard output)",
    )
    add("--report", type=Path, metavar="FILE", help="write a page about the build: timeline, slowest units, sizes")
    add("--verbose", action="store_true", help="show every command and its output")
    options = parser.parse_args(arguments)
    if options.specs is not None and (options.families or given(options)):
        words = " ".join(["--families", *(axis.option for axis in axes())])
        parser.error(f"--specs: the file says what to build: none of {words} can go with it")
    if options.report is not None and (options.dry_run or not options.report.absolute().parent.is_dir()):
        parser.error("--report: wanted a file in a directory that exists, of a build that is no --dry-run")
    return options


def given(options: argparse.Namespace) -> dict[str, Values]:
    """The values of the axes that options name."""
    values = {axis.name: getattr(options, axis.name) for axis in axes()}
    return {name: value for name, value in values.items() if value is not None}


def targets(options: argparse.Namespace) -> dict[str, Target]:
    """What to compile for, per backend that is to be built."""
    level = options.cpu_arch or env.CPU_ARCH.get() or "native"
    archs = options.cuda_arch or env.CUDA_ARCH_LIST.get()
    backends = options.backend or ("cpu", *(("cuda",) if archs or visible_gpus() else ()))
    chosen = {}
    if "cpu" in backends:
        chosen["cpu"] = Target("cpu", (native_level() if level == "native" else level,), True)
    if "cuda" in backends:
        chosen["cuda"] = Target("cuda", archs, True) if archs else wanted_target("cuda")
    return chosen


def requests_of(options: argparse.Namespace) -> list[Request]:
    """What to build: the matrix, or what a file of specs asks for.

    Raises:
        FlashInferError: a tool is missing, or nothing says what to compile for.
        UsageError: the file of specs cannot be used.
        ValueError: the matrix has a module that cannot be.
    """
    if options.specs is not None:
        asked = _one_of_a_name(asked_in(options.specs, workspace() / "sources"))
        asked = [one for one in asked if one.spec.backend in (options.backend or BACKENDS)]
        specs = [(one.spec, target_of(one, options)) for one in asked]
    else:
        chosen = targets(options)
        matrix = Matrix(backends=tuple(chosen), **given(options))
        specs = [
            (spec, chosen[spec.backend])
            for spec in matrix_specs(matrix, options.families)
            if can_be_built(spec, chosen[spec.backend])
        ]
        if options.backend is None and "cuda" not in chosen:
            print(CROSS_BUILD, file=sys.stderr)
    return [build.make_request(spec, options.out_dir / spec.name, target) for spec, target in specs]


def can_be_built(spec: Spec, target: Target) -> bool:
    """Whether a module of the matrix has kernels for one of the archs; where it has none, it is left out."""
    try:
        return bool(narrowed(target, spec.archs, spec.name).archs)
    except ToolchainError as err:
        print(f"note: left out: {err}", file=sys.stderr)
        return False


def _one_of_a_name(asked: list[Asked]) -> list[Asked]:
    try:
        return one_per_name(asked)
    except ValueError as err:
        raise UsageError(f"--specs: {err}") from None


def target_of(asked: Asked, options: argparse.Namespace) -> Target:
    """What a recorded spec is built for: the archs named here, else those it was wanted for, else this machine's."""
    backend = asked.spec.backend
    named = options.cpu_arch if backend == "cpu" else options.cuda_arch
    recorded = asked.target() if named is None else None
    if recorded is not None:
        return recorded
    return targets(argparse.Namespace(**{**vars(options), "backend": (backend,)}))[backend]


@dataclass
class Row:
    """One line of the table. ``how``: built, reused or failed; in a dry run build, copy or reuse."""

    name: str
    archs: tuple[str, ...]
    how: str
    why: str = ""
    size: int = 0
    seconds: float = 0.0
    path: str = ""


def plan(request: Request) -> Row:
    """What building the request would do."""
    name, archs = request.spec.name, request.target.archs
    found = build.finished(request)
    if found is not None:
        if found.directory == request.destination:
            return Row(name, archs, "reuse", "up to date", found.manifest["size"], 0.0, str(found.path))
        return Row(
            name, archs, "copy", f"built already at {found.directory}", found.manifest["size"], 0.0, str(found.path)
        )
    present = read(request.destination, name)
    if not isinstance(present, Artifact):
        return Row(name, archs, "build", present or "not there yet")
    reasons = differences(present, request.spec)
    for field, was, now in (
        ("target", present.archs, request.target.archs),
        ("tools", present.manifest["toolchain"], request.toolchain.identity),
    ):
        if was != now:
            reasons.append(f"{field}: {was} -> {now}")
    return Row(name, archs, "build", "; ".join(reasons) or "the artifact is damaged")


class Display:
    """Progress on a terminal as a bar; elsewhere as a line now and then."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.last = 0.0

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, progress: Progress) -> None:
        left = ", ".join(progress.left[:4]) + (", ..." if len(progress.left) > 4 else "") or "done"
        if self.bar is not None:
            self.bar.update(self.task, total=progress.total, completed=progress.done, description=left)
            return
        now = time.monotonic()
        if now - self.last >= 5 or progress.done == progress.total:
            self.last, elapsed = now, now - progress.started
            to_go = elapsed / max(progress.done, 1) * (progress.total - progress.done)
            print(
                f"{progress.done}/{progress.total} steps, {elapsed:.0f} s, about {to_go:.0f} s to go: {left}",
                file=sys.stderr,
                flush=True,
            )


def print_table(rows: list[Row], out: Any) -> None:
    cells = [("module", "arch", "size", "seconds", "", "")]
    for row in rows:
        size = f"{row.size / 1024:.0f} KiB" if row.size else ""
        cells.append(
            (row.name, " ".join(row.archs), size, f"{row.seconds:.1f}" if row.seconds else "", row.how, row.why)
        )
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    for cell in cells:
        numbers = (
            f"{text:>{width}}" if column in (2, 3) else f"{text:<{width}}"
            for column, (text, width) in enumerate(zip(cell, widths, strict=False))
        )
        print("  ".join((*numbers, cell[5])).rstrip(), file=out)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started = time.monotonic()
    try:
        requests = requests_of(options)
    except (FlashInferError, UsageError, ValueError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    for axis in axes():
        if axis.name in given(options) and axis not in axes(options.families):
            print(f"note: none of these families is built for values of {axis.option}", file=sys.stderr)

    outcomes = []
    if options.dry_run:
        rows = [plan(request) for request in requests]
    else:
        with Display() as display:
            outcomes = build.run(requests, verbose=options.verbose, jobs=options.jobs, watch=display)
        rows = [row_of(outcome) for outcome in outcomes]
    if options.json != "-":
        print_table(rows, sys.stdout)
    if options.json:
        text = json.dumps([vars(row) for row in rows], indent=1) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)

    reported = True
    if options.report:
        try:
            write_report(options.report, outcomes, time.monotonic() - started)
        except OSError as err:
            print(f"error: the report cannot be written: {err}", file=sys.stderr)
            reported = False
    counts = ", ".join(f"{sum(row.how == how for row in rows)} {how}" for how in dict.fromkeys(row.how for row in rows))
    print(f"{options.out_dir}: {counts} in {time.monotonic() - started:.1f} s", file=sys.stderr)
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in failed:
        print(f"\n{error}", file=sys.stderr)
    for error in failed:
        print(f"FAILED {error.name}: {error.reason}", file=sys.stderr)
    return 1 if failed or not reported else 0


def row_of(outcome: Outcome) -> Row:
    spec, target = outcome.request.spec, outcome.request.target
    if outcome.artifact is None:
        return Row(spec.name, target.archs, outcome.how, outcome.error.reason if outcome.error else "")
    manifest = outcome.artifact.manifest
    seconds = manifest["seconds"] if outcome.how == "built" else 0.0
    return Row(spec.name, target.archs, outcome.how, "", manifest["size"], seconds, str(outcome.artifact.path))
