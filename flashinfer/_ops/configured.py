"""Operators that a configuration chooses: a spec, its module, the module's namespace with what torch must know of it.

An operator of ``define()`` has one module for each device. Where sizes, variants or tiles choose among modules, each
module registers its operators in a namespace of its own, and :func:`configured` finds it by the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import env
from ..jit import store
from ..jit.events import emit
from ..jit.load import load
from ..jit.module import JitSpec
from .errors import on_copies

Fakes = Mapping[str, Callable[..., Any]]  # name of an operator -> its fake implementation

_fakes: dict[str, torch.library.Library] = {}
_loaded_dispatching: dict[str, JitSpec] = {}


def configured(spec_of: Callable[..., JitSpec], fakes: Fakes) -> Callable[..., Any]:
    """A function: configuration -> the namespace of its operators; found, else built, once in a process.

    Args:
        spec_of: configuration -> the spec of its module, such as a family's ``gen_*_module``.
        fakes: of the module's operators; see :func:`with_fakes`.
    """

    @cache
    def operators(*configuration: Any) -> Any:
        return with_fakes(load_configured(spec_of(*configuration)), fakes)

    return operators


def with_fakes(namespace: Any, fakes: Fakes) -> Any:
    """A module's namespace, whose operators torch can trace now: those of ``fakes`` that it has."""
    if not is_dynamo_compiling() and namespace.name not in _fakes:  # nothing can be registered in a graph, nor is
        library = torch.library.Library(namespace.name, "IMPL")
        for name, fake in fakes.items():
            if not hasattr(namespace, name):
                continue
            library.impl(name, fake, "Meta")
            # The stable interface by which modules register themselves has tags from torch 2.12 on.
            operator = getattr(namespace, name).default
            operator._tags = [*operator.tags, torch.Tag.pt2_compliant_tag]
            if operator._schema.is_mutable:
                library.impl(name, on_copies(operator), "Negative")
        _fakes[namespace.name] = library
    return namespace


def load_configured(spec: JitSpec) -> Any:
    """The ``torch.ops`` namespace of a module that computes what ``spec`` describes.

    The module of exactly that configuration is taken wherever it is; else a dispatching one, built ahead of time, that
    was built for this configuration among others; else the exact one is built. Keep what this returns: it looks at
    files.

    Raises:
        BuildError, JitFrozenError, ModuleLoadError, ToolchainError: as :func:`flashinfer.jit.load.load`.
    """
    several = _dispatching(spec)
    if several is None or store.look_up(spec).artifact is not None:
        return load(spec)
    lookup = store.look_up(several, dict(spec.coverage))
    if lookup.artifact is not None:
        several = several.covering(lookup.artifact.manifest["coverage"])
        # A process holds one dispatching module of a name: which, the first call decided.
        if _loaded_dispatching.setdefault(several.name, several) == several:
            return load(several)
    else:
        emit("miss", several.name, reason=lookup.reason)
    return load(spec)


def covered(spec: JitSpec) -> bool:
    """Whether a dispatching module, built ahead of time, stands for a module that there is none of."""
    several = _dispatching(spec)
    if several is None or store.look_up(spec).artifact is not None:
        return False
    return store.look_up(several, dict(spec.coverage)).artifact is not None


def _dispatching(spec: JitSpec) -> JitSpec | None:
    """A spec to look for dispatching modules with, where any is there at all: mostly there is none, and nothing to do."""
    if not spec.dispatching or not any((folder / spec.dispatching).is_dir() for folder in env.aot_dirs()):
        return None
    return replace(spec, name=spec.dispatching, namespace=spec.dispatching, dispatching="")
