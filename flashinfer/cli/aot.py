"""Builds ahead of time: ``build`` without names, in one ninja run over the graph that the JIT uses too.

    python scripts/build_aot.py                                   # CPU modules, and CUDA for visible GPUs
    python scripts/build_aot.py --backend cuda --cuda-arch "9.0a 8.0"     # CUDA without a GPU
    python scripts/build_aot.py --dry-run                         # print modules to build, with reasons
    python scripts/build_aot.py --specs specs.jsonl               # the modules recorded by `flashinfer trace`
    python scripts/build_aot.py --cluster tcp://127.0.0.1:8786    # on Dask workers, see docs/cluster.md

Modules that are up to date are not touched, and nothing is compiled twice. Torch is not imported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import env
from ..errors import ToolchainError
from ..jit.artifact import Artifact, read
from ..jit.build import make_request
from ..jit.cluster import address
from ..jit.lookup import BuildRequest
from ..jit.machine.target import CPU_LEVELS, Target, narrowed, native_level, visible_gpus, wanted_target
from ..jit.machine.workspace import workspace
from ..jit.modules import Matrix, Values, axes, families, matrix_specs, some_of
from ..jit.report import write
from ..jit.resolve import find_existing, resolve
from ..jit.spec import BACKENDS, Spec
from ..jit.specfile import RecordedSpec
from .difference import differences
from .display import Display, row, row_of, tell_failures
from .report import write_report
from .table import show, size
from .usage import Add, UsageError, cuda_archs, of, positive, recorded_specs, seconds, shard, unique_by_name

if TYPE_CHECKING:
    from ..jit.cluster.client import ClusterClient

CROSS_BUILD = (
    "CUDA modules were left out: no GPU is visible. To build them here, name the archs:"
    ' python scripts/build_aot.py --cuda-arch "9.0a 8.0"'
)


def arguments(add: Add) -> None:
    """Declare the options of builds ahead of time."""
    add(
        "--backend",
        type=of(some_of(*BACKENDS)),
        metavar="LIST",
        help="cpu, cuda or both; by default cpu, and cuda if archs or GPUs are known",
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
        help="build the modules that `flashinfer trace` recorded, for the recorded archs unless others are named",
    )
    add(
        "--shard",
        type=shard,
        metavar="I/N",
        help="only every N-th module, beginning with the I-th: N machines build all of them",
    )
    add("--out-dir", type=Path, default=env.default_aot_dir(), metavar="DIR", help="by default data/aot")
    add("--jobs", type=positive, metavar="N", help="compilers at once; by default MAX_JOBS or the number of CPUs")
    add("--dry-run", action="store_true", help="print the modules to build, with reasons, and build nothing")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the table as JSON to FILE, or to standard output without FILE or with -",
    )
    add("--report", type=Path, metavar="FILE", help="write a page about the build: timeline, slowest units, sizes")
    add("--verbose", action="store_true", help="show every command and its output")
    add(
        "--cluster",
        type=of(address.parse),
        metavar="ADDRESS",
        help="build on the workers of this Dask scheduler; --jobs then counts per worker",
    )
    add("--cluster-wait", type=seconds, metavar="SECONDS", help="wait for a suitable worker; by default 60")
    add("--cluster-insecure", action="store_true", help="allow tcp:// to another machine, without encryption")


def run(options: argparse.Namespace) -> int:
    """Return 1 if a module did not build or the report cannot be written."""
    check(options)
    started, outcomes = time.monotonic(), []
    with cluster_of(options) as cluster:
        requests = requests_of(options, make_request if cluster is None else cluster.request)
        if options.dry_run:
            rows = [plan(request) for request in requests]
        else:
            with Display() as display:
                work = resolve if cluster is None else cluster.run
                outcomes = work(requests, verbose=options.verbose, jobs=options.jobs, watch=display)
            rows = [row_of(outcome) for outcome in outcomes]
    # Files are written before standard output, whose reader may be gone.
    text = json.dumps(rows, indent=1, default=str) + "\n"
    if options.json not in (None, "", "-"):
        Path(options.json).write_text(text)
    took, code = time.monotonic() - started, 0
    if options.report:
        try:
            write_report(options.report, outcomes, took)
        except OSError as err:
            write(f"error: the report cannot be written: {err}\n")
            code = 1
    if options.json == "-":
        print(text, end="")
    else:
        columns = [{name: value for name, value in one.items() if name != "path"} for one in rows]
        show(columns, False, {"size": size})
    hows = [one["how"] for one in rows]
    counts = ", ".join(f"{hows.count(how)} {how}" for how in dict.fromkeys(hows))
    write(f"{options.out_dir}: {counts} in {took:.1f} s\n")
    return tell_failures(outcomes) or code


def chosen(options: argparse.Namespace) -> bool:
    """Return whether an option selects modules, targets or a directory, which named modules do not accept."""
    parts = (options.backend, options.cuda_arch, options.cpu_arch, options.families, options.specs, options.shard)
    rest = (
        options.report,
        options.cluster,
        options.dry_run,
        axis_values(options),
        options.out_dir != env.default_aot_dir(),
    )
    return any(parts) or any(rest)


def check(options: argparse.Namespace) -> None:
    """Raise ``UsageError`` for options that contradict each other."""
    if options.specs is not None and (options.families or axis_values(options)):
        words = " ".join(["--families", *(axis.option for axis in axes())])
        raise UsageError(f"--specs: the file selects the modules: none of {words} can be added")
    if options.report is not None and (options.dry_run or not options.report.absolute().parent.is_dir()):
        raise UsageError("--report: wanted a file in an existing directory, without --dry-run")
    if options.cluster is None and (options.cluster_wait is not None or options.cluster_insecure):
        raise UsageError("--cluster-wait, --cluster-insecure: wanted only with --cluster")
    why = None if options.cluster is None or options.cluster_insecure else address.why_insecure(options.cluster)
    if why is not None:
        raise UsageError(f"--cluster: {why}")


def cluster_of(options: argparse.Namespace) -> AbstractContextManager[ClusterClient | None]:
    """Return the cluster that builds, or a context without one."""
    if options.cluster is None:
        return nullcontext()
    from ..jit.cluster.client import ClusterClient  # imported only here: `distributed` is an extra and takes a second

    return ClusterClient(options.cluster, 60.0 if options.cluster_wait is None else options.cluster_wait)


def axis_values(options: argparse.Namespace) -> dict[str, Values]:
    """Return the values of the axes that options name."""
    values = {axis.name: getattr(options, axis.name) for axis in axes()}
    return {name: value for name, value in values.items() if value is not None}


def targets(options: argparse.Namespace) -> dict[str, Target]:
    """Return the target of each backend to build."""
    level = options.cpu_arch or env.CPU_ARCH.get() or "native"
    archs = options.cuda_arch or env.CUDA_ARCH_LIST.get()
    backends = options.backend or ("cpu", *(("cuda",) if archs or visible_gpus() else ()))
    chosen = {}
    if "cpu" in backends:
        chosen["cpu"] = Target("cpu", (native_level() if level == "native" else level,), True)
    if "cuda" in backends:
        chosen["cuda"] = Target("cuda", archs, True) if archs else wanted_target("cuda")
    return chosen


def requests_of(options: argparse.Namespace, make: Callable[[Spec, Path, Target], BuildRequest]) -> list[BuildRequest]:
    """Return the builds of the matrix or of a file of specs, as requests made by ``make``.

    Raises:
        FlashInferError: a tool is missing, or no target is known.
        UsageError: the file of specs is invalid, or a module of the matrix is.
    """
    if options.specs is not None:
        recorded = unique_by_name(recorded_specs(options.specs, workspace() / "sources"))
        recorded = [one for one in recorded if one.spec.backend in (options.backend or BACKENDS)]
        specs = [(one.spec, target_of(one, options)) for one in recorded]
    else:
        chosen = targets(options)
        matrix = Matrix(backends=tuple(chosen), **axis_values(options))
        try:
            found = matrix_specs(matrix, options.families)
        except ValueError as err:
            raise UsageError(str(err)) from None
        specs = [(spec, chosen[spec.backend]) for spec in found if can_be_built(spec, chosen[spec.backend])]
        if options.backend is None and "cuda" not in chosen:
            write(f"{CROSS_BUILD}\n")
    if options.shard is not None:
        first, count = options.shard
        specs = sorted(specs, key=lambda one: one[0].name)[first - 1 :: count]
    return [make(spec, options.out_dir / spec.name, target) for spec, target in specs]


def can_be_built(spec: Spec, target: Target) -> bool:
    """Return whether a module of the matrix has kernels for one of the archs. Otherwise it is left out."""
    try:
        return bool(narrowed(target, spec.archs, spec.name).archs)
    except ToolchainError as err:
        write(f"note: left out: {err}\n")
        return False


def target_of(recorded: RecordedSpec, options: argparse.Namespace) -> Target:
    """Return a recorded spec's target: archs of the options, else the recorded ones, else the default."""
    backend = recorded.spec.backend
    named = options.cpu_arch if backend == "cpu" else options.cuda_arch
    target = recorded.target() if named is None else None
    if target is not None:
        return target
    return targets(argparse.Namespace(**{**vars(options), "backend": (backend,)}))[backend]


def plan(request: BuildRequest) -> dict[str, Any]:
    """Return the row that shows how the request would be built."""
    name, archs = request.spec.name, request.target.archs
    found = find_existing(request).artifact
    if found is not None and found.directory == request.destination:
        return row(name, "reuse", archs, found, "up to date")
    if found is not None:
        return row(name, "copy", archs, found, f"already built at {found.directory}")
    present = read(request.destination, name)
    if not isinstance(present, Artifact):
        return row(name, "build", archs, None, present or "not built yet")
    reasons = differences(present, request.spec, archs, request.identity)
    return row(name, "build", archs, None, "; ".join(reasons) or "the artifact is damaged")
