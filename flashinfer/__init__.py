"""Kernels for LLM inference, built ahead of time or on first use from one ninja graph.

``flashinfer.<function>`` finds the function in its module, ``flashinfer/<module>.py``; those are imported when one is
used, or at once where torch is loaded already, so that their operators exist for programs saved with them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

from . import jit as jit

# Before the plus: the release of FlashInfer's interface that engines compare and pin. After it: flashinfer.env.VERSION.
__version__ = "0.7.2.post1+1.0.0"

# What they hold is found there, and not under flashinfer itself.
_APART = {
    "cli", "deep_gemm", "delta_rule", "dsv3_ops", "env", "errors", "gdn_kernels", "integrations", "jit", "profiler",
    "testing", "tllm_enums", "topk", "triton", "utils",
}  # fmt: skip


def _modules() -> list[ModuleType]:
    """The modules of functions and wrappers: every public file and package here but a few."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names if name[0] != "_" and name not in _APART]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _APART:
        return importlib.import_module(f"{__name__}.{name}")
    modules = _modules()
    if name in globals():  # a module, which its import has put there
        return globals()[name]
    for module in modules:
        if name in module.__all__:
            # Kept, so that the next look-up is a plain one.
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for module in _modules() for name in module.__all__)})


if "torch" in sys.modules:
    _modules()
