"""Registry of all operators. Saved programs may call an operator whose Python module is not imported yet.

``schemas.py`` lists every operator with the Python module that defines it. An access from Python through ``torch.ops``
imports the module first. C++ programs, such as packages of AOTInductor, call the dispatcher. It finds the registered
schema and a stub. The stub imports the Python module and calls the operator again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .schemas import SCHEMAS

LIBRARIES: dict[str, torch.library.Library] = {}  # namespace -> its library
KERNELS: dict[str, Callable[..., Any]] = {}  # "namespace::name" -> the kernel, once its module is imported
_schemas: dict[str, str] = {}  # "namespace::name" -> its schema
_modules: dict[str, str] = {}  # "namespace::name" -> the module that defines it


def library(namespace: str) -> torch.library.Library:
    """Return the library that registers the operators of a namespace."""
    if namespace not in LIBRARIES:
        LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return LIBRARIES[namespace]


def register(namespace: str, schema: str, kernel: Callable[..., Any]) -> str:
    """Register an operator with its kernel for every device, and return its name.

    Raises:
        RuntimeError: ``schemas.py`` lists another schema.
    """
    name = schema[: schema.index("(")]
    key = f"{namespace}::{name}"
    listed = _schemas.get(key)
    if listed is None:
        library(namespace).define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library(namespace).impl(name, kernel, "CompositeExplicitAutograd")
    elif listed != schema:
        raise RuntimeError(f"{key}: got schema {schema}, listed is {listed}: run python scripts/init_stub.py")
    KERNELS[key] = kernel
    return name


def _call(key: str, *args: Any) -> Any:
    """Call the kernel of an operator. Without one, import the module and call the operator again."""
    if (kernel := KERNELS.get(key)) is not None:
        return kernel(*args)
    importlib.import_module(_modules[key])
    if key not in KERNELS:
        raise RuntimeError(f"{key}: {_modules[key]} does not define it: run python scripts/init_stub.py")
    namespace, name = key.split("::")
    return getattr(getattr(torch.ops, namespace), name).default(*args)


def _find(namespace: str, name: str) -> Any:
    """Import the module of an operator on its first access from Python. Leave other names to torch."""
    if (key := f"{namespace}::{name}") in _modules and key not in KERNELS:
        importlib.import_module(_modules[key])
        if (packet := vars(getattr(torch.ops, namespace)).get(name)) is not None:
            return packet
    raise AttributeError(name)


def _register_all() -> None:
    for module, schemas in SCHEMAS.items():
        for listed in schemas:
            namespace, schema = listed.split("::", 1)
            name = schema[: schema.index("(")]
            key = f"{namespace}::{name}"
            library(namespace).define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            library(namespace).impl(name, partial(_call, key), "CompositeExplicitAutograd")
            _schemas[key], _modules[key] = schema, module
    for namespace in LIBRARIES:
        # A __getattr__ in the dictionary of a module (PEP 562) has priority over that of torch's namespace class.
        vars(getattr(torch.ops, namespace))["__getattr__"] = partial(_find, namespace)


_register_all()
