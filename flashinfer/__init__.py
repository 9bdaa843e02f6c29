"""Kernels for LLM inference, built ahead of time or on first use from one ninja graph.

``flashinfer.<name>`` imports the one module that ``flashinfer/__init__.pyi`` lists for the name, on its first
use.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

# Before the plus: the release of FlashInfer's interface that engines compare. After it:
# flashinfer.env.VERSION.
__version__ = "0.7.2.post1+1.0.0"


@functools.cache
def _names() -> dict[str, str]:
    """Map each public name to its module, and each public module to ``"."``, as the stub lists them."""
    assert __loader__ is not None
    stub = __loader__.get_data(os.path.join(os.path.dirname(__file__), "__init__.pyi"))  # type: ignore[attr-defined]
    # from .norm import rmsnorm as rmsnorm
    lines = (line.split() for line in stub.decode().splitlines() if line.startswith("from ."))
    return {line[3]: line[1] for line in lines}


def __getattr__(name: str) -> Any:
    module = None if name.startswith("_") else _names().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module == ".":
        return importlib.import_module(f".{name}", __name__)
    # The name is now an attribute: the next access does not call this function.
    return globals().setdefault(name, getattr(importlib.import_module(module, __name__), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})


# A process that only loads a saved program must find the program's operators.
if "torch" in sys.modules:
    importlib.import_module("._ops.registry", __name__)
