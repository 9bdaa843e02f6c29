"""Loading of modules. A process loads each module once."""

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
from .lookup import Needs, Request, is_built_from
from .machine.workspace import NOEXEC, is_noexec, workspace_root
from .resolve import find_existing, record, resolve
from .spec import Spec

DAY = 86400.0  # seconds

LOADED: dict[str, Artifact] = {}  # name -> artifact that is part of this process
module_locks: dict[str, threading.RLock] = {}
_loading = set[str]()  # modules whose lock is held
# An iterator around count(), because Dynamo copies a plain count, and Python 3.12 deprecates such copies.
_numbers = iter(itertools.count().__next__, None)


def _reset_locks() -> None:
    """Reset the locks in a forked child, which lacks the threads that hold them."""
    module_locks.clear()
    _loading.clear()


os.register_at_fork(after_in_child=_reset_locks)


def load(spec: Spec, needs: Needs | None = None) -> Any:
    """Load a module and return its ``torch.ops`` namespace. Build the module first if it does not exist.

    ``needs``: see :class:`flashinfer.jit.lookup.Request`.

    Raises:
        ModuleLoadError: the module cannot be loaded, or this process has loaded another build of it.
        BuildError, JitFrozenError, ToolchainError: the module does not exist and cannot be built.
        ReentrantBuildError: this thread is already loading it, further up its stack.
        CaptureError: a CUDA graph is being captured, and the module is not loaded yet.
    """
    import torch

    record(spec, needs)
    started = time.perf_counter()
    with _exclusive(spec):
        if loaded(spec, needs) is None:
            if spec.backend == "cuda":  # the driver may allocate memory and wait
                refuse_capture(f"module {spec.name!r} would be loaded", WARM_UP)
            artifact = find_existing(Request(spec, needs, use=partial(_use_hit, started))).artifact
            if artifact is not None:
                _record_load(spec, artifact, started)
    if spec.name not in LOADED:
        # resolve() runs outside of the lock: importing the build code may itself request this module.
        (outcome,) = resolve([Request(spec, needs)])
        if outcome.error is not None:
            raise outcome.error
        with _exclusive(spec):
            if loaded(spec, needs) is None and (artifact := outcome.artifact) is not None:
                with verified(artifact) as descriptor:
                    map_library(artifact, descriptor)
                _record_load(spec, artifact, started)
    return getattr(torch.ops, spec.namespace)


@contextmanager
def _exclusive(spec: Spec) -> Iterator[None]:
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


def _use_hit(started: float, found: Artifact, descriptor: int) -> None:
    emit("hit", found.name, (time.perf_counter() - started) * 1e3, path=found.path)
    map_library(found, descriptor)


def _record_load(spec: Spec, artifact: Artifact, started: float) -> None:
    """Record that this process has loaded a module."""
    mark_used(artifact)
    LOADED[spec.name] = artifact
    emit("load", spec.name, (time.perf_counter() - started) * 1e3, path=artifact.path)


def loaded(spec: Spec, needs: Needs | None = None) -> Artifact | None:
    """Return the artifact of this module if this process has loaded it.

    Raises:
        ModuleLoadError: another build than ``spec`` describes is loaded, or it lacks the needed values.
    """
    present = LOADED.get(spec.name)
    if present is None:
        return None
    has = present.manifest["coverage"]
    if not is_built_from(spec, present):
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

    ``torch.ops.load_library`` opens the path instead. A library with ``$ORIGIN`` in its run path is not supported.
    """
    import torch

    # glibc identifies open libraries by name. The name of a descriptor may later mean another file, and glibc would
    # then return the old library. So each load uses a new name.
    name = f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}"
    try:
        with process.without_forks():  # no fork meanwhile: the child would inherit locked locks of the linker and torch
            library = ctypes.CDLL(name if os.path.exists(name) else str(found.path))
    except OSError as err:
        cause = str(err).replace(name, found.path.name)
        if is_noexec(found.path):
            variable = "FLASHINFER_AOT_DIR" if found.is_prebuilt else "FLASHINFER_WORKSPACE_DIR"
            cause += f"; {NOEXEC}: set {variable} to a directory on another one"
        raise ModuleLoadError(f"module {found.name!r} at {found.path} does not load: {cause}") from err
    _set_debug_path(library, name, found.path)
    torch.ops.loaded_libraries.add(str(found.path))


class _LinkMap(ctypes.Structure):
    """The first members of ``struct link_map`` of <link.h>. A handle of dlopen points to it, and debuggers read it."""

    _fields_ = [("address", ctypes.c_size_t), ("name", ctypes.c_void_p)]


def _set_debug_path(library: ctypes.CDLL, name: str, path: Path) -> None:
    """Set a library's name to its path. Debuggers and stack traces cannot use the name of a descriptor."""
    entry = _LinkMap.from_address(library._handle)
    if entry.name and ctypes.string_at(entry.name) == name.encode():
        duplicate = ctypes.CDLL(None).strdup
        duplicate.restype = ctypes.c_void_p
        entry.name = duplicate(os.fsencode(path))  # never freed: the library is never closed
