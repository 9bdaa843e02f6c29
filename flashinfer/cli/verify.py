"""``verify``: prove, without a GPU and without compiling, that a program with these modules compiles nothing.

Every lookup of the program is done here as a load would do it, for this machine or for another one, described
by its GPUs and its CPU level. C libraries and torch are those of this process, so run it in the image of the
program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from .. import env
from ..errors import ToolchainError
from ..jit.lookup import Machine
from ..jit.machine.arch import Arch
from ..jit.machine.target import (
    CPU_LEVELS,
    Target,
    level_features,
    narrowed,
    visible_gpus,
    wanted_target,
    why_not_on,
)
from ..jit.machine.workspace import scratch
from ..jit.modules import Matrix, matrix_specs
from ..jit.process import lazy
from ..jit.report import write
from ..jit.resolve import look_up
from ..jit.spec import Spec
from ..jit.specfile import RecordedSpec
from .table import show
from .usage import Add, UsageError, cuda_archs, json_option, recorded_specs


class OtherMachine(Machine):
    """Another machine, with the tools and the environment of this one."""

    loads = False

    def __init__(self, spec: Spec, gpus: tuple[tuple[int, int], ...], level: str) -> None:
        super().__init__(spec, cache_versions=False)
        self.gpus, self.level = gpus, level

    @lazy
    def requested_target(self) -> Target | None:
        is_requested = (
            env.CPU_ARCH.get() not in (None, "native") if self.backend == "cpu" else env.CUDA_ARCH_LIST.is_set
        )
        if is_requested:
            return wanted_target(self.backend)
        if self.backend == "cpu":
            return Target("cpu", (self.level,), env.CPU_ARCH.get() is not None)
        return Target("cuda", tuple(str(Arch.native(gpu)) for gpu in self.gpus), False)

    def why_not_runnable(self, archs: Iterable[str]) -> str | None:
        if self.backend == "cpu":
            return next((why for arch in archs if (why := self._too_new(arch))), None)
        return why_not_on(self.gpus, archs, "the machine", on_all=not self.spec.archs)

    def _too_new(self, arch: str) -> str | None:
        lacks = sorted(set(level_features(arch)) - set(level_features(self.level)))
        if lacks or arch not in CPU_LEVELS:
            return f"compiled for {arch}, the machine is {self.level}"
        return None


HELP = "Prove that a program with these modules compiles nothing. The exit code is 1 if it would."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("--specs", type=Path, metavar="FILE", help="the modules recorded by `trace`; by default the whole matrix")
    add("--cuda-arch", type=cuda_archs, metavar="LIST", help='GPUs of the target machine, such as "9.0 8.0"')
    add("--cpu-arch", metavar="LEVEL", help="CPU level of the target machine, such as x86-64-v3")


def run(options: argparse.Namespace) -> int:
    """Return 1 and print the reasons if a module would be compiled or is not available at all."""
    if options.cpu_arch is not None and options.cpu_arch not in CPU_LEVELS:
        raise UsageError(f"--cpu-arch: got {options.cpu_arch!r}, wanted one of {', '.join(CPU_LEVELS)}")
    with scratch() as folder:
        rows = [_row(recorded, options) for recorded in _specs(options, folder)]
    show(rows, options.json)
    missing = sum(row["state"] != "ready" for row in rows)
    if missing:
        write(f"{missing} of {len(rows)} modules would be compiled\n")
    return 1 if missing else 0


def _specs(options: argparse.Namespace, folder: Path) -> list[RecordedSpec]:
    if options.specs is not None:
        return recorded_specs(options.specs, folder)
    matrix = [RecordedSpec(spec, {}, (), spec.key) for spec in matrix_specs(Matrix())]
    return [recorded for recorded in matrix if _has_kernels(recorded, options)]


def _has_kernels(recorded: RecordedSpec, options: argparse.Namespace) -> bool:
    """Return whether a module of the matrix has kernels for the machine. Otherwise no program loads it there."""
    spec, requested_target = recorded.spec, _machine(recorded, options).requested_target
    try:
        return requested_target is None or bool(narrowed(requested_target, spec.archs, spec.name).archs)
    except ToolchainError:
        return False


def _row(recorded: RecordedSpec, options: argparse.Namespace) -> dict[str, object]:
    spec = recorded.spec
    lookup = look_up(spec, recorded.needs, machine=_machine(recorded, options))
    why = "" if lookup.artifact is not None else lookup.reason
    if why and recorded.key != spec.key:
        why += "; it was recorded with other sources than those here"
    return {
        "name": spec.name,
        "backend": spec.backend,
        "needs": recorded.needs,
        "state": "ready" if lookup.artifact is not None else "missing",
        "where": lookup.artifact.directory if lookup.artifact is not None else None,
        "why": why,
    }


def _machine(recorded: RecordedSpec, options: argparse.Namespace) -> Machine:
    """Return the machine that options describe, else this one, else (without a GPU) the one of the trace."""
    if recorded.spec.backend == "cpu" and options.cpu_arch is not None:
        return OtherMachine(recorded.spec, (), options.cpu_arch)
    if recorded.spec.backend == "cuda" and (archs := options.cuda_arch or (() if visible_gpus() else recorded.archs)):
        return OtherMachine(recorded.spec, tuple(sorted({Arch.of(arch).capability for arch in archs})), "")
    return Machine(recorded.spec, cache_versions=False)
