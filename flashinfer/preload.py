"""Loading of modules before a capture, a benchmark or the first request of a server needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ._ops.configured import has_dispatching_module, load_configured
from ._ops.errors import type_error
from .jit.events import Event, subscribe
from .jit.frozen import refuse_capture
from .jit.load import load
from .jit.module import JitSpec

__all__ = ["warmup"]


@dataclass(frozen=True)
class Loaded:
    """A module after a warm-up: already ``present`` in this process, a ``hit``, or ``built``.

    Loading took ``ms``.
    """

    name: str
    how: Literal["present", "hit", "built"]
    ms: float


def warmup(
    what: Iterable[JitSpec] | str | os.PathLike[str] | Callable[..., object], *args: Any, **kwargs: Any
) -> list[Loaded]:
    """Load everything that a CUDA graph, a benchmark or a server will need.

    Missing modules are built in parallel.

    Args:
        what: specs, such as ``flashinfer.jit.gen_*_module(...)`` returns; or the path of a file of specs that
            ``flashinfer trace`` wrote; or a function, such as a step of a model. The function is called once
            with ``args`` and ``kwargs``. On CUDA it runs on a side stream, between earlier and later work of
            the current stream. Gradients are recorded as usual.

    Returns:
        The loaded modules in order. For specs, modules that were present before are included.

    Raises:
        CaptureError: a CUDA graph is being captured.
        BuildError, JitFrozenError, ModuleLoadError, ToolchainError: a module cannot be loaded.
        ValueError, TypeError: no specs, no file of specs, or arguments without a function.

    Call ``flashinfer.jit.freeze()`` afterwards, so that a missing module is an error.
    """
    refuse_capture("warmup: modules would be loaded", "call it")
    if callable(what):
        with _Listener() as listener:
            _call(what, args, kwargs)
        return listener.loaded()
    if args or kwargs:
        raise type_error("warmup", "what", f"{type(what).__name__} with arguments", "a function with them")
    if not isinstance(what, str | os.PathLike):
        specs = _specs(what)
        with _Listener() as listener:
            _load([(spec, None) for spec in specs])
        return listener.loaded([spec.name for spec in specs])
    return _load_file(Path(what))


def _specs(what: Iterable[JitSpec]) -> list[JitSpec]:
    if not isinstance(what, Iterable):
        raise type_error("warmup", "what", type(what).__name__, "specs, a path or a function")
    specs = list(dict.fromkeys(what))
    for spec in specs:
        if not isinstance(spec, JitSpec):
            raise type_error("warmup", "what", f"a {type(spec).__name__} among specs", "JitSpec")
    return specs


def _call(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.cuda.is_initialized():
        function(*args, **kwargs)
        return
    # torch's rule for warm-ups: a capture would wait for work of the default stream.
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            function(*args, **kwargs)
    finally:
        current.wait_stream(side)


def _load_file(path: Path) -> list[Loaded]:
    from .jit.machine.workspace import scratch  # imported here because only files of specs need it
    from .jit.specfile import read_specs

    with scratch(prefix="flashinfer-warmup-") as folder:
        try:
            requests = read_specs(path, folder)
        except ValueError as err:
            raise ValueError(f"warmup: {err}") from None
        with _Listener() as listener:
            _load([(request.spec, request.needs) for request in requests])
        return listener.loaded([request.spec.name for request in requests])


def _load(requests: list[tuple[JitSpec, dict[str, list[Any]] | None]]) -> None:
    """Build all missing modules at once, then load one after the other."""
    missing = [
        spec for spec, needs in requests if spec.probe(needs).state == "buildable" and not has_dispatching_module(spec)
    ]
    if missing:
        from .jit.resolve import build_jit_specs

        build_jit_specs(missing)
    for spec, needs in requests:
        # Functions prefer a module that was built ahead of time for several configurations, so load that one.
        load_configured(spec) if has_dispatching_module(spec) else load(spec, needs)


class _Listener:
    """Events of the build system during a block."""

    def __init__(self) -> None:
        self.built: set[str] = set()
        self.loads: dict[str, float] = {}

    def __enter__(self) -> _Listener:
        self._end = subscribe(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _record(self, event: Event) -> None:
        if event.kind in ("compile", "wait"):
            self.built.add(event.module)
        elif event.kind == "load":
            self.loads[event.module] = event.ms

    def loaded(self, names: Iterable[str] = ()) -> list[Loaded]:
        """Return the modules that were loaded, and those of ``names`` that were present before."""
        found = [Loaded(name, "built" if name in self.built else "hit", ms) for name, ms in self.loads.items()]
        return [*(Loaded(name, "present", 0.0) for name in dict.fromkeys(names) if name not in self.loads), *found]
