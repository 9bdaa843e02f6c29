"""Loading before it is needed: ahead of a capture, a benchmark or the first request of a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ._ops.configured import covered, load_configured
from .jit.capture import refuse_capture
from .jit.events import Event, subscribe
from .jit.load import load
from .jit.module import JitSpec

__all__ = ["warmup"]


@dataclass(frozen=True)
class Loaded:
    """A module that a warm-up made ready: ``present`` in this process before, a ``hit``, or ``built``; ``ms`` it took."""

    name: str
    how: Literal["present", "hit", "built"]
    ms: float


def warmup(
    what: Iterable[JitSpec] | str | os.PathLike[str] | Callable[..., object], *args: Any, **kwargs: Any
) -> list[Loaded]:
    """Load everything that a CUDA graph, a benchmark or a server will need, building in parallel what is missing.

    Args:
        what: specs, as ``flashinfer.jit.gen_*_module(...)`` returns them; or the path of a file of specs, as ``python -m
            flashinfer trace`` writes it; or a function, which is called once with ``args`` and ``kwargs``: a step of a model.
            On CUDA that happens on a stream of its own, behind all that the current one was given, and the current one
            goes on behind it; nothing else is changed, gradients are recorded where the function records them.

    Returns:
        What was loaded, in the order in which it was. Of specs, those that were there before are in it too.

    Raises:
        CaptureError: a CUDA graph is being captured.
        BuildError, JitFrozenError, ModuleLoadError, ToolchainError: a module cannot be had.
        ValueError, TypeError: no specs, no file of specs, or arguments without a function.

    After it, ``flashinfer.jit.freeze()`` makes an error of whatever was forgotten.
    """
    refuse_capture("warmup: modules would be loaded", "call it")
    if callable(what):
        with _Heard() as heard:
            _call(what, args, kwargs)
        return heard.loaded()
    if args or kwargs:
        raise TypeError(f"warmup: got arguments and {type(what).__name__}, wanted a function with them")
    if not isinstance(what, str | os.PathLike):
        specs = _specs(what)
        with _Heard() as heard:
            _load([(spec, None) for spec in specs])
        return heard.loaded([spec.name for spec in specs])
    return _load_file(Path(what))


def _specs(what: Iterable[JitSpec]) -> list[JitSpec]:
    if not isinstance(what, Iterable):
        raise TypeError(f"warmup: what: got {type(what).__name__}, wanted specs, a path or a function")
    specs = list(dict.fromkeys(what))
    for spec in specs:
        if not isinstance(spec, JitSpec):
            raise TypeError(f"warmup: what: got a {type(spec).__name__} among specs, wanted JitSpec")
    return specs


def _call(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.cuda.is_initialized():
        function(*args, **kwargs)
        return
    # As torch asks for it: what the default stream does while something is captured would be waited for.
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            function(*args, **kwargs)
    finally:
        current.wait_stream(side)


def _load_file(path: Path) -> list[Loaded]:
    from .jit.machine.workspace import scratch  # for this alone, as what reads files of specs is
    from .jit.specfile import read_specs

    with scratch(prefix="flashinfer-warmup-") as folder:
        try:
            asked = read_specs(path, folder)
        except ValueError as err:
            raise ValueError(f"warmup: {err}") from None
        with _Heard() as heard:
            _load([(one.spec, one.needs) for one in asked])
        return heard.loaded([one.spec.name for one in asked])


def _load(wanted: list[tuple[JitSpec, dict[str, list[Any]] | None]]) -> None:
    """All at once what has to be built, then one after the other."""
    missing = [spec for spec, needs in wanted if spec.probe(needs).state == "buildable" and not covered(spec)]
    if missing:
        from .jit.build import build_jit_specs

        build_jit_specs(missing)
    for spec, needs in wanted:
        # A module that was built for this configuration among others is taken where there is one, as functions do.
        load_configured(spec) if covered(spec) else load(spec, needs)


class _Heard:
    """What the build system told while it was listened to."""

    def __init__(self) -> None:
        self.built: set[str] = set()
        self.loads: dict[str, float] = {}

    def __enter__(self) -> _Heard:
        self._end = subscribe(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _hear(self, event: Event) -> None:
        if event.kind in ("compile", "wait"):
            self.built.add(event.module)
        elif event.kind == "load":
            self.loads[event.module] = event.ms

    def loaded(self, names: Iterable[str] = ()) -> list[Loaded]:
        """What was loaded, and those of ``names`` that were there before."""
        found = [Loaded(name, "built" if name in self.built else "hit", ms) for name, ms in self.loads.items()]
        return [*(Loaded(name, "present", 0.0) for name in dict.fromkeys(names) if name not in self.loads), *found]
