"""Kernels for LLM inference, built ahead of time or on first use from one ninja graph.

``flashinfer.<function>`` finds the function in its family's module; families are imported when one is used, or at
once where torch is loaded already, so that their operators exist for programs saved with them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import jit

__version__ = "0.1.0"


def _families() -> list[Any]:
    return [importlib.import_module(f"{__name__}.{name}") for name in jit.modules.families()]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _families():
        if name in module.__all__:
            # Kept, so that the next look-up is a plain one.
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for module in _families() for name in module.__all__)})


if "torch" in sys.modules:
    _families()
