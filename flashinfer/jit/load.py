"""Loads modules into this process, each once."""

from __future__ import annotations

import threading
import time
from typing import Any

from ..errors import ModuleLoadError
from . import store
from .events import asked, emit
from .spec import JitSpec
from .store import Artifact, Needs

_loaded: dict[str, Artifact] = {}
_guard = threading.Lock()
_per_module: dict[str, threading.Lock] = {}


def load(spec: JitSpec, needs: Needs | None = None) -> Any:
    """Load a module, building it if there is none yet, and return its ``torch.ops`` namespace.

    ``needs``: see :func:`flashinfer.jit.store.find`.

    Raises:
        ModuleLoadError: it cannot be loaded, or another build of it is already part of this process.
        BuildError, JitDisabledError, ToolchainError: there is none and none can be built.
    """
    import torch

    asked(spec, needs)
    with _guard:
        lock = _per_module.setdefault(spec.name, threading.Lock())
    with lock:
        _load_locked(spec, needs)
    return getattr(torch.ops, spec.namespace)


def _load_locked(spec: JitSpec, needs: Needs | None) -> None:
    import torch

    started = time.perf_counter()
    present = _loaded.get(spec.name)
    if present is not None:
        if present.manifest["key"] not in (spec.key, spec.covering(present.manifest["coverage"]).key):
            raise ModuleLoadError(
                f"module {spec.name!r} is loaded from {present.path} and its sources, flags or configuration have"
                " changed since: operators are registered once per process, start a new one to use the new build"
            )
        return
    artifact = store.find(spec, needs).artifact
    if artifact is None:
        from .build import find_or_build

        (artifact,) = find_or_build([spec])
    else:
        emit("hit", spec.name, (time.perf_counter() - started) * 1e3, path=artifact.path)
    try:
        torch.ops.load_library(str(artifact.path))
    except (OSError, RuntimeError) as err:
        cause = err.__cause__ or err
        raise ModuleLoadError(f"module {spec.name!r} at {artifact.path} does not load: {cause}") from err
    _loaded[spec.name] = artifact
    emit("load", spec.name, (time.perf_counter() - started) * 1e3, path=artifact.path)
