"""Recording of the modules that a program requests, so that another machine can build exactly these."""

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
    """Record a request for ``spec``: one file per distinct request in ``FLASHINFER_JIT_TRACE``."""
    if not env.JIT_TRACE.is_set:
        return
    folder = env.JIT_TRACE.get()
    values = {axis: sorted(values) for axis, values in (needs or {}).items()}
    request = (spec, folder, json.dumps(values))
    if folder is None or request in _recorded:
        return
    _recorded.add(request)
    try:
        archs = list(narrowed(wanted_target(spec.backend), spec.archs, spec.name).archs)
    except ToolchainError:
        archs = []  # no target is known here, so the builder chooses
    from .specjson import to_json  # imported only here, because builds do not record

    try:
        if not folder.is_dir():  # `trace` removes it at its end, and a process may outlive `trace`
            raise FileNotFoundError(f"{folder} does not exist")
        line = {"spec": to_json(spec), "key": spec.key, "needs": values, "archs": archs}
        write_atomically(folder / f"{digest(line)}.json", json.dumps(line).encode())
    except (OSError, ValueError) as err:
        say(f"{spec.name} is missing in the trace: {err}")
