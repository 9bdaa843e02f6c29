"""``build``: modules of the matrix, into the workspace."""

from __future__ import annotations

import argparse

from ..jit import build, frozen, store
from .display import Display, row, row_of, tell_failures
from .table import show, size
from .usage import Add, json_option, named

HELP = "Build modules into the workspace, all in one run."


def arguments(add: Add) -> None:
    json_option(add)
    add("names", nargs="+", metavar="NAME", help="a module, as `list` names it")
    add("--verbose", action="store_true", help="show every command and its output")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where a module did not build."""
    rows, requests = [], []
    for spec in named(options.names):
        lookup = store.look_up(spec)
        if lookup.artifact is not None:
            rows.append(row(spec.name, "ready", lookup.artifact.archs, lookup.artifact))
        else:
            frozen.check(spec.name, lookup.reason)
            requests.append(build.make_request(spec, key=lookup.key))
    with Display() as display:
        outcomes = build.run(requests, verbose=options.verbose, watch=display)
    rows += map(row_of, outcomes)
    show(sorted(rows, key=lambda one: str(one["name"])), options.json, {"size": size})
    return tell_failures(outcomes)
