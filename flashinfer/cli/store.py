"""``store``: make keys, and transfer artifacts to and from a store that machines share."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import env
from ..errors import WorkspaceError
from ..jit.artifact import Artifact
from ..jit.lookup import Machine, workspace_directory
from ..jit.machine import trust
from ..jit.machine.target import narrowed
from ..jit.machine.workspace import scratch, workspace
from ..jit.remote.objects import ObjectId
from ..jit.remote.signing import keygen, signer, trusted_keys
from ..jit.remote.transfer import fetch, fetch_default, link_refusal, repair
from ..jit.remote.transport import Store
from ..jit.report import write
from ..jit.resolve import look_up
from ..jit.specfile import RecordedSpec
from .display import row
from .table import Row, show, size
from .usage import Add, UsageError, json_option, named, recorded_specs, unique_by_name

HELP = "Make a signing key, write built modules to a store, or read modules from one."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("action", choices=("keygen", "push", "pull"), help="what to do")
    add("place", metavar="FILE|URL", help="keygen: the file of the new private key; otherwise a store's URL")
    add("names", nargs="*", metavar="NAME", help="a module, as `list` names it")
    add("--specs", type=Path, metavar="FILE", help="the modules recorded by `trace`")
    add("--to", type=Path, metavar="DIR", help="pull: a directory for FLASHINFER_AOT_DIR; by default the workspace")


def run(options: argparse.Namespace) -> int:
    """Return 1 if a module is not built, or the store does not have it or rejects it."""
    if options.to is not None and options.action != "pull":
        raise UsageError(f"--to: {options.action} writes no directory")
    if options.action == "keygen":
        return _keygen(options)
    if bool(options.names) == bool(options.specs):
        raise UsageError(f"store {options.action}: wanted either names or --specs")
    try:
        one = Store(env.store_url(options.place))
    except ValueError as err:
        raise UsageError(f"store: URL: {err}") from None
    with scratch() as folder:
        if options.specs is not None:
            recorded = recorded_specs(options.specs, folder)
        else:
            recorded = [RecordedSpec(spec, {}, (), spec.key) for spec in named(options.names)]
        rows = (_push if options.action == "push" else _pull)(one, recorded, options.to)
    show(rows, options.json, {"size": size})
    missing = [str(one["name"]) for one in rows if one["how"] in ("missing", "failed")]
    if missing:
        write(f"error: {len(missing)} of {len(rows)} modules: {', '.join(missing)}\n")
    return 1 if missing else 0


def _keygen(options: argparse.Namespace) -> int:
    if options.names or options.specs:
        raise UsageError("store keygen: wanted one FILE and nothing else")
    try:
        print(keygen(Path(options.place)))
    except OSError as err:
        raise UsageError(f"store keygen: {options.place}: {err.strerror}") from None
    return 0


def _push(one: Store, recorded: list[RecordedSpec], to: Path | None) -> list[Row]:
    sign, rows = signer() if one.signed else None, list[Row]()
    for module in recorded:
        lookup = look_up(module.spec, module.needs)
        if lookup.artifact is None:
            rows.append(row(module.spec.name, "missing", (), None, lookup.reason))
        else:
            how = repair(one, lookup.artifact, sign) or "failed"
            rows.append(row(module.spec.name, how, lookup.artifact.archs, lookup.artifact))
    return rows


def _pull(one: Store, recorded: list[RecordedSpec], to: Path | None) -> list[Row]:
    if one.signed:
        trusted_keys()
    if to is not None:
        recorded = unique_by_name(recorded)
        trust.make_directories(to)
        if (refusal := trust.refusal(to)) is not None:
            raise WorkspaceError(f"{refusal}: nothing in it would be loaded")
    return [_pulled(one, module, to) for module in recorded]


def _pulled(one: Store, recorded: RecordedSpec, to: Path | None) -> Row:
    """Pull a module: any build for the archs into a directory, or this machine's build into the workspace."""
    spec, here = recorded.spec, Machine(recorded.spec)
    key = spec.key
    target = (recorded.target() if to else None) or here.requested_target
    archs = narrowed(target, spec.archs, spec.name).archs if target is not None else recorded.archs

    def destination(build_key: str) -> Path:
        return to / spec.name if to else workspace_directory(workspace(), spec, key, build_key)

    def refusal(found: Artifact) -> str | None:
        return link_refusal(found) if to else here.refusal(found)

    found, build = None, here.build_key(key)
    if to is None and (found := look_up(spec, recorded.needs).artifact) is not None:
        return row(spec.name, "there already", found.archs, found)
    if build and archs == (here.target and here.target.archs):
        found = fetch([one], ObjectId(spec.name, key, build), destination(build), refusal)
    if found is None and (to is not None or not build):
        found = fetch_default([one], spec, key, archs, destination, refusal)
    why = "" if found is not None else f"not in {one.url}, or refused: see above"
    return row(spec.name, "pulled" if found is not None else "missing", archs, found, why)
