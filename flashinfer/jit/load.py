"""Loading of modules into this process, each once."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ModuleLoadError, ReentrantBuildError
from . import process
from .artifact import MANIFEST, Artifact, verified
from .events import emit
from .frozen import WARM_UP, refuse_capture
from .lookup import Needs, Request, is_of
from .machine.workspace import NOEXEC, is_noexec, workspace_root
from .resolve import ask, record, resolve
from .spec import Spec

DAY = 86400.0  # seconds

LOADED: dict[str, Artifact] = {}  # name -> artifact that is part of this process
module_locks: dict[str, threading.RLock] = {}
_loading = set[str]()  # modules whose lock is held
_numbers = iter(
    itertools.count().__next__, None
)  # not the count itself: Dynamo copies it, which Python 3.12 deprecates


def _start_afresh() -> None:
    """Reset the locks in a forked child, which lacks the threads that hold them."""
    module_locks.clear()
    _loading.clear()


os.register_at_fork(after_in_child=_start_afresh)


def load(spec: Spec, needs: Needs | None = None) -> Any:
    """Load a module, build it first if it does not exist, and return its ``torch.ops`` namespace.

    ``needs``: see :class:`flashinfer.jit.lookup.Request`.

    Raises:
        ModuleLoadError: it cannot be loaded, or another build of it is already part of this process.
        BuildError, JitFrozenError, ToolchainError: it does not exist and cannot be built.
        ReentrantBuildError: this thread is already loading it, further up its stack.
        CaptureError: a CUDA graph is being captured, and the module is not loaded yet.
    """
    import torch

    record(spec, needs)
    started = time.perf_counter()
    with _only(spec):
        if loaded(spec, needs) is None:
            if spec.backend == "cuda":  # the driver may allocate memory and wait
                refuse_capture(f"module {spec.name!r} would be loaded", WARM_UP)
            artifact = ask(Request(spec, needs, use=partial(_hit, started))).artifact
            if artifact is not None:
                _keep(spec, artifact, started)
    if spec.name not in LOADED:
        # Without the module's lock: the imports run code that may request the module.
        (outcome,) = resolve([Request(spec, needs)])
        if outcome.error is not None:
            raise outcome.error
        with _only(spec):
            if loaded(spec, needs) is None and (artifact := outcome.artifact) is not None:
                with verified(artifact) as descriptor:
                    map_library(artifact, descriptor)
                _keep(spec, artifact, started)
    return getattr(torch.ops, spec.namespace)


@contextmanager
def _only(spec: Spec) -> Iterator[None]:
    """Let one thread load a module.

    Raises:
        ReentrantBuildError: this thread is loading it already.
    """
    with module_locks.setdefault(spec.name, threading.RLock()):  # setdefault is atomic
        if spec.name in _loading:  # the lock is reentrant
            raise ReentrantBuildError(spec.name)
        _loading.add(spec.name)
        try:
            yield
        finally:
            _loading.discard(spec.name)


def _hit(started: float, found: Artifact, descriptor: int) -> None:
    emit("hit", found.name, (time.perf_counter() - started) * 1e3, path=found.path)
    map_library(found, descriptor)


def _keep(spec: Spec, artifact: Artifact, started: float) -> None:
    """Remember a module that is part of this process now."""
    mark_used(artifact)
    LOADED[spec.name] = artifact
    emit("load", spec.name, (time.perf_counter() - started) * 1e3, path=artifact.path)


def loaded(spec: Spec, needs: Needs | None = None) -> Artifact | None:
    """Return the artifact of this module if it is already part of this process.

    Raises:
        ModuleLoadError: another build than ``spec`` describes is loaded, or it lacks the needed values.
    """
    present = LOADED.get(spec.name)
    if present is None:
        return None
    has = present.manifest["coverage"]
    if not is_of(spec, present):
        raise ModuleLoadError(
            f"module {spec.name!r} is loaded from {present.path} and its sources, flags or configuration have"
            " changed since: operators are registered once per process, start a new one to use the new build"
        )
    for axis, values in (needs or {}).items():
        if not set(values) <= set(has.get(axis, ())):
            raise ModuleLoadError(
                f"module {spec.name!r} is loaded from {present.path}, which was built for {axis}"
                f" {' '.join(map(str, has.get(axis, ())))}; wanted {' '.join(map(str, values))}"
            )
    return present


def mark_used(found: Artifact) -> None:
    """Mark an artifact of the workspace as used for ``gc``, at most once a day and only if possible."""
    manifest = f"{os.path.dirname(found.path)}/{MANIFEST}"
    with suppress(OSError):
        if time.time() - os.stat(manifest).st_mtime > DAY and found.path.is_relative_to(workspace_root()):
            os.utime(manifest)


def map_library(found: Artifact, descriptor: int) -> None:
    """Map the verified file through its descriptor, because its path may name another file by now.

    ``torch.ops.load_library`` would open the path. A library with ``$ORIGIN`` in its run path is not
    supported.
    """
    import torch

    # glibc returns an open library for every name that it was opened by, even if the name, like that of a
    # descriptor, now means another file. So no name is used twice.
    name = f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}"
    try:
        with process.one_step():  # the linker and torch hold locks meanwhile, which a fork could copy locked
            library = ctypes.CDLL(name if os.path.exists(name) else str(found.path))
    except OSError as err:
        cause = str(err).replace(name, found.path.name)
        if is_noexec(found.path):
            variable = "FLASHINFER_AOT_DIR" if found.is_prebuilt else "FLASHINFER_WORKSPACE_DIR"
            cause += f"; {NOEXEC}: set {variable} to a directory on another one"
        raise ModuleLoadError(f"module {found.name!r} at {found.path} does not load: {cause}") from err
    _tell_name(library, name, found.path)
    torch.ops.loaded_libraries.add(str(found.path))


class _LinkMap(ctypes.Structure):
    """The beginning of ``struct link_map`` of <link.h>.

    Debuggers read it, and a handle of dlopen points to it.
    """

    _fields_ = [("address", ctypes.c_size_t), ("name", ctypes.c_void_p)]


def _tell_name(library: ctypes.CDLL, name: str, path: Path) -> None:
    """Give a library its path for debuggers and stack traces, which cannot use the name of a descriptor."""
    entry = _LinkMap.from_address(library._handle)
    if entry.name and ctypes.string_at(entry.name) == name.encode():
        duplicate = ctypes.CDLL(None).strdup
        duplicate.restype = ctypes.c_void_p
        entry.name = duplicate(os.fsencode(path))  # never freed: the library is never closed
