"""Operators with one module per configuration: their namespaces and fake implementations.

An operator of ``define()`` has one module for each device. If sizes, variants or tiles select the module, each
module registers its operators in a namespace of its own. :func:`configured` finds the namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import env
from ..jit.events import emit
from ..jit.load import load
from ..jit.module import JitSpec
from ..jit.resolve import look_up
from .errors import on_copies

Fakes = Mapping[str, Callable[..., Any]]  # name of an operator -> its fake implementation

_fakes: dict[str, torch.library.Library] = {}
_loaded_dispatching: dict[str, JitSpec] = {}


def configured(spec_of: Callable[..., JitSpec], fakes: Fakes) -> Callable[..., Any]:
    """Return a cached function that maps a configuration to the namespace of its operators.

    The function loads or builds the module.

    Args:
        spec_of: maps a configuration to the spec of its module, such as a family's ``gen_*_module``.
        fakes: fake implementations of the module's operators, as for :func:`with_fakes`.
    """

    @cache
    def operators(*configuration: Any) -> Any:
        return with_fakes(load_configured(spec_of(*configuration)), fakes)

    return operators


def with_fakes(namespace: Any, fakes: Fakes) -> Any:
    """Register the fake implementations of a module's operators, and return its namespace."""
    if not is_dynamo_compiling() and namespace.name not in _fakes:  # a graph cannot register anything
        library = torch.library.Library(namespace.name, "IMPL")
        for name, fake in fakes.items():
            if not hasattr(namespace, name):
                continue
            library.impl(name, fake, "Meta")
            # Modules register operators through torch's stable ABI, which supports tags only from torch 2.12 on.
            operator = getattr(namespace, name).default
            operator._tags = [*operator.tags, torch.Tag.pt2_compliant_tag]
            if operator._schema.is_mutable:
                library.impl(name, on_copies(operator), "Negative")
        _fakes[namespace.name] = library
    return namespace


def load_configured(spec: JitSpec) -> Any:
    """Return the ``torch.ops`` namespace of a module for the configuration of ``spec``.

    Load the module of exactly this configuration if it exists, else a dispatching module of an AOT directory that
    covers the configuration, else build the exact module. Callers cache the result, because the lookup reads files.

    Raises:
        BuildError, JitFrozenError, ModuleLoadError, ToolchainError: as :func:`flashinfer.jit.load.load`.
    """
    dispatching_spec = _dispatching(spec)
    if dispatching_spec is None or look_up(spec).artifact is not None:
        return load(spec)
    lookup = look_up(dispatching_spec, dict(spec.coverage))
    if lookup.artifact is not None:
        dispatching_spec = dispatching_spec.covering(lookup.artifact.manifest["coverage"])
        # A process can load only one dispatching module of each name.
        if _loaded_dispatching.setdefault(dispatching_spec.name, dispatching_spec) == dispatching_spec:
            return load(dispatching_spec)
    else:
        emit("miss", dispatching_spec.name, reason=lookup.reason)
    return load(spec)


def has_dispatching_module(spec: JitSpec) -> bool:
    """Return whether a load of ``spec`` would use a dispatching module of an AOT directory."""
    dispatching_spec = _dispatching(spec)
    if dispatching_spec is None or look_up(spec).artifact is not None:
        return False
    return look_up(dispatching_spec, dict(spec.coverage)).artifact is not None


def _dispatching(spec: JitSpec) -> JitSpec | None:
    """Return a spec for the lookup of dispatching modules, or ``None`` if no AOT directory has one."""
    if not spec.dispatching or not any((folder / spec.dispatching).is_dir() for folder in env.aot_dirs()):
        return None
    return replace(spec, name=spec.dispatching, namespace=spec.dispatching, dispatching="")
