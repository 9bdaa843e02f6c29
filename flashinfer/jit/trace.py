"""Records what a program asks for, so that another machine can build exactly that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import env
from ..errors import ToolchainError
from .machine.target import narrowed, wanted_target
from .machine.workspace import write_atomically
from .report import say
from .spec import Spec, digest

_recorded: set[Any] = set()


def record(spec: Spec, needs: Mapping[str, Any] | None = None) -> None:
    """Write down that this process asks for ``spec``: one file per distinct request in ``FLASHINFER_JIT_TRACE``."""
    if not env.JIT_TRACE.is_set:
        return
    folder = env.JIT_TRACE.get()
    wanted = {axis: sorted(values) for axis, values in (needs or {}).items()}
    request = (spec, folder, json.dumps(wanted))
    if folder is None or request in _recorded:
        return
    _recorded.add(request)
    try:
        archs = list(narrowed(wanted_target(spec.backend), spec.archs, spec.name).archs)
    except ToolchainError:
        archs = []  # nothing says for what; whoever builds it will
    from .specjson import to_json  # for this alone: recording is no part of building

    try:
        if not folder.is_dir():  # it ends with `trace`, which a process may outlive
            raise FileNotFoundError(f"{folder} does not exist")
        line = {"spec": to_json(spec), "key": spec.key, "needs": wanted, "archs": archs}
        write_atomically(folder / f"{digest(line)}.json", json.dumps(line).encode())
    except (OSError, ValueError) as err:
        say(f"{spec.name} is missing in the trace: {err}")
