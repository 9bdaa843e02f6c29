"""Loads modules into this process, each once."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ModuleLoadError, ReentrantBuildError
from . import process, store
from .artifact import MANIFEST, Artifact, verified
from .capture import WARM_UP, refuse_capture
from .events import emit
from .machine.workspace import NOEXEC, is_noexec, workspace_root
from .spec import Spec
from .trace import record

DAY = 86400.0  # seconds

_loaded: dict[str, Artifact] = {}
_per_module: dict[str, threading.RLock] = {}
_loading = set[str]()  # modules whose lock is held
_numbers = iter(
    itertools.count().__next__, None
)  # not a count itself, which Dynamo copies: Python 3.12 deprecates that
Builder = Callable[[Mapping[Spec, store.Lookup]], Mapping[Spec, Artifact]]


def _start_afresh() -> None:
    """A forked child must not wait for a thread that it does not have."""
    _per_module.clear()
    _loading.clear()


os.register_at_fork(after_in_child=_start_afresh)


def load(spec: Spec, needs: store.Needs | None = None) -> Any:
    """Load a module, building it if there is none yet, and return its ``torch.ops`` namespace.

    ``needs``: see :func:`flashinfer.jit.store.look_up`.

    Raises:
        ModuleLoadError: it cannot be loaded, or another build of it is already part of this process.
        BuildError, JitFrozenError, ToolchainError: there is none and none can be built.
        ReentrantBuildError: this very thread is loading it, further up its stack.
        CaptureError: a CUDA graph is being captured, and the module is not loaded yet.
    """
    import torch

    record(spec, needs)
    builder: Builder | None = None
    while not _load(spec, needs, builder):
        with process.one_step():  # without the module's lock: importing executes files, which may ask for the module
            from .build import build_missing as builder
    return getattr(torch.ops, spec.namespace)


def loaded(spec: Spec, needs: store.Needs | None = None) -> Artifact | None:
    """The artifact of this module that is part of this process already.

    Raises:
        ModuleLoadError: it is another build than ``spec`` describes now, or lacks what is needed.
    """
    present = _loaded.get(spec.name)
    if present is None:
        return None
    has = present.manifest["coverage"]
    if not store.is_of(spec, present):
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


def _load(spec: Spec, needs: store.Needs | None, builder: Builder | None) -> bool:
    """Load a module, under its lock. False: there is none yet, and no builder."""
    with _per_module.setdefault(spec.name, threading.RLock()):  # setdefault is atomic
        if spec.name in _loading:  # the lock lets in the thread that has it
            raise ReentrantBuildError(spec.name)
        _loading.add(spec.name)
        try:
            return loaded(spec, needs) is not None or _find(spec, needs, builder)
        finally:
            _loading.discard(spec.name)


def _find(spec: Spec, needs: store.Needs | None, builder: Builder | None) -> bool:
    started = time.perf_counter()
    if spec.backend == "cuda":  # the driver may allocate for it and wait
        refuse_capture(f"module {spec.name!r} would be loaded", WARM_UP)

    def use(found: Artifact, descriptor: int) -> None:
        emit("hit", spec.name, (time.perf_counter() - started) * 1e3, path=found.path)
        _map(found, descriptor)

    lookup = store.look_up(spec, needs, use)
    artifact = lookup.artifact
    if artifact is None:
        if builder is None:
            return False
        artifact = builder({spec: lookup})[spec]
        with verified(artifact) as descriptor:
            _map(artifact, descriptor)
    mark_used(artifact)
    _loaded[spec.name] = artifact
    emit("load", spec.name, (time.perf_counter() - started) * 1e3, path=artifact.path)
    return True


def mark_used(found: Artifact) -> None:
    """Tell ``gc`` that an artifact of the workspace is in use: at most once a day, and only where that can be."""
    manifest = f"{os.path.dirname(found.path)}/{MANIFEST}"
    with suppress(OSError):
        if time.time() - os.stat(manifest).st_mtime > DAY and found.path.is_relative_to(workspace_root()):
            os.utime(manifest)


def _map(found: Artifact, descriptor: int) -> None:
    """Map the very file that was verified, whatever its path leads to by now.

    ``torch.ops.load_library`` would go by the path. A library that says ``$ORIGIN`` in its run path is not supported.
    """
    import torch

    # glibc gives a library again to whoever asks by a name that it was opened by, even if the name has another meaning
    # now, as that of a descriptor has: so no name is used twice.
    name = f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}"
    try:
        with process.one_step():  # the linker and torch hold locks meanwhile, which a forked child would find taken
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
    """The beginning of ``struct link_map`` of <link.h>, which debuggers read and a handle of dlopen points to."""

    _fields_ = [("address", ctypes.c_size_t), ("name", ctypes.c_void_p)]


def _tell_name(library: ctypes.CDLL, name: str, path: Path) -> None:
    """Let debuggers and stack traces find the library: a descriptor's name means nothing to them."""
    entry = _LinkMap.from_address(library._handle)
    if entry.name and ctypes.string_at(entry.name) == name.encode():
        duplicate = ctypes.CDLL(None).strdup
        duplicate.restype = ctypes.c_void_p
        entry.name = duplicate(os.fsencode(path))  # never freed: the library is never closed
