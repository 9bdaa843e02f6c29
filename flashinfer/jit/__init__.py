"""The build system: specs, one ninja graph, and a cache of artifacts.

The files in the order of their use: ``spec`` (a value) and ``module`` (its methods) -> ``load`` -> ``resolve``
(the sources of artifacts in order) -> ``lookup`` (AOT directories and the workspace) -> ``artifact`` and
``machine/trust`` (checks) -> ``machine/target``, ``machine/toolchain`` -> ``lock`` -> ``remote`` (stores that
machines share) -> ``build`` (``ninja``, ``history``, and before each compiler ``worker``). ``probe`` predicts a
load, ``frozen`` forbids builds, ``modules`` has one file per family. ``group`` coordinates ranks, ``background``
prefetches. Nothing here imports torch before a module is loaded.
"""

from __future__ import annotations

import importlib
import shutil
from typing import TYPE_CHECKING, Any

from .. import env
from ..errors import JitFrozenError as MissingJITCacheError  # FlashInfer's name of it
from . import modules, process
from .events import stats, subscribe
from .frozen import freeze
from .machine.workspace import PARTS, workspace_root
from .module import JitSpec, gen_jit_spec

if TYPE_CHECKING:
    from .background import prefetch as prefetch
    from .group import ensure as ensure
    from .resolve import build_jit_specs as build_jit_specs

# Name -> the file that is imported on its first use.
_LAZY = {"build_jit_specs": "resolve", "ensure": "group", "prefetch": "background"}
__all__ = [
    "JitSpec",
    "MissingJITCacheError",
    "clear_cache_dir",
    "env",
    "freeze",
    "gen_jit_spec",
    "stats",
    "subscribe",
    *_LAZY,
]


def clear_cache_dir() -> None:
    """Remove everything built into the workspace. Prebuilt modules and loaded modules stay."""
    from .gc import PATIENCE, lock_name  # imported only here, because most processes remove nothing
    from .lock import exclusive

    root = workspace_root()
    with exclusive(lock_name(root), PATIENCE):
        for part in PARTS:
            shutil.rmtree(root / part, ignore_errors=True)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        with process.without_forks():
            return getattr(importlib.import_module(f".{_LAZY[name]}", __package__), name)
    # A family's file defines its gen_*_module. FlashInfer's other names are in .attention.
    if name.startswith(("gen_", "get_")):
        for family in modules.families():
            module = modules.family(family)
            if name in vars(module):
                return getattr(module, name)
        addresses = importlib.import_module(".attention", __package__)
        if name in addresses.__all__:
            return getattr(addresses, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
