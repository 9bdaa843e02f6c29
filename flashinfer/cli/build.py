"""``build``: named modules into the workspace, or without names every module ahead of time."""

from __future__ import annotations

import argparse

from ..jit.lookup import Request
from ..jit.resolve import resolve
from . import aot
from .display import Display, row_of, tell_failures
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
    requests = [Request(spec) for spec in named(options.names)]
    with Display() as display:
        outcomes = resolve(requests, verbose=options.verbose, jobs=options.jobs, watch=display)
    rows = map(row_of, outcomes)
    show(sorted(rows, key=lambda one: str(one["name"])), bool(options.json), {"size": size})
    return tell_failures(outcomes)
