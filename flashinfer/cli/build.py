"""``build``: named modules into the workspace, or without names every module ahead of time."""

from __future__ import annotations

import argparse

from ..jit import build, frozen
from ..jit.lookup import look_up
from . import aot
from .display import Display, row, row_of, tell_failures
from .table import show, size
from .usage import Add, UsageError, named

HELP = "Build the named modules into the workspace; without names, build ahead of time, for this machine or others."


def arguments(add: Add) -> None:
    """Declare the options."""
    add("names", nargs="*", metavar="NAME", help="a module, as `list` names it, built into the workspace")
    aot.arguments(add)


def run(options: argparse.Namespace) -> int:
    """Return 1 if a module did not build."""
    if not options.names:
        return aot.run(options)
    if options.json not in (None, "-") or aot.chosen(options):
        raise UsageError("build NAME: wanted no other options than --verbose, --jobs and --json")
    rows, requests = [], []
    for spec in named(options.names):
        lookup = look_up(spec)
        if lookup.artifact is not None:
            rows.append(row(spec.name, "ready", lookup.artifact.archs, lookup.artifact))
        else:
            frozen.check(spec.name, lookup.reason)
            requests.append(build.make_request(spec, key=lookup.key))
    with Display() as display:
        outcomes = build.run(requests, verbose=options.verbose, jobs=options.jobs, watch=display)
    rows += map(row_of, outcomes)
    show(sorted(rows, key=lambda one: str(one["name"])), bool(options.json), {"size": size})
    return tell_failures(outcomes)
