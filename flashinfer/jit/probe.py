"""Probes: predictions of a load, for callers that choose between this library and another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ModuleLoadError, ToolchainError
from . import frozen, history
from .lookup import Machine, Needs
from .machine.target import narrowed, wanted_target
from .machine.toolchain import find_toolchain
from .resolve import Lookup, look_up
from .spec import Spec


@dataclass(frozen=True)
class Probe:
    """Prediction of a load.

    It is ``ready`` (at ``where``), ``buildable`` (in ``estimate`` seconds if this machine built it before;
    ``reason``: why it is missing) or ``impossible`` (for ``reason``).
    """

    state: Literal["ready", "buildable", "impossible"]
    where: Path | None = None
    estimate: float | None = None
    reason: str = ""


def probe(spec: Spec, needs: Needs | None = None) -> Probe:
    """Look up a module like a load, then check what a build would need. Nothing is written.

    No tool is started, except a compiler whose version is not cached: an existing artifact may have been built by it.
    """
    from .load import loaded

    try:
        present = loaded(spec, needs)
        here = Machine(spec, cache_versions=False)
        lookup = look_up(spec, needs, machine=here) if present is None else Lookup(present, ())
    except OSError as err:
        return Probe("impossible", reason=f"sources cannot be read: {err}")
    except ModuleLoadError as err:
        return Probe("impossible", reason=str(err))
    if lookup.artifact is not None:
        return Probe("ready", lookup.artifact.path)
    by = frozen.forbidden_by()
    if by is not None:
        return Probe("impossible", reason=f"{by} forbids building it: {lookup.reason}")
    try:
        narrowed(wanted_target(spec.backend), spec.archs, spec.name)
        find_toolchain(spec.backend)
    except ToolchainError as err:
        return Probe("impossible", reason=str(err))
    return Probe("buildable", estimate=history.estimate(spec), reason=lookup.reason)
