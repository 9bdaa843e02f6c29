"""The build system: specs, one ninja graph, artifacts that are found again. Reads in the order of its use:

``spec`` (a value; ``module``: what can be done with one) -> ``closure`` -> ``store`` (where to look), ``artifact`` and
``machine/trust`` (what may be used) -> ``machine/target``, ``machine/toolchain`` -> ``build`` -> ``host/lock`` -> ``run``
(``ninja``, and before each compiler ``worker``) -> ``publish`` -> ``load``. ``probe`` answers without doing, ``frozen``
forbids. ``modules`` has one file per family. ``group``: ranks that decide together; ``background``: what is built meanwhile;
``store_remote``: what other machines have built. Nothing here imports torch until a module is loaded.
"""

from __future__ import annotations

import importlib
import shutil
from typing import TYPE_CHECKING, Any

from .. import env
from . import modules, process
from .events import stats, subscribe
from .frozen import freeze
from .machine.workspace import PARTS, workspace_root
from .module import JitSpec, gen_jit_spec

if TYPE_CHECKING:
    from .background import prefetch as prefetch
    from .build import build_jit_specs as build_jit_specs
    from .group import ensure as ensure

# Imported when they are asked for, from these files.
_LATE = {"build_jit_specs": "build", "ensure": "group", "prefetch": "background"}
__all__ = ["JitSpec", "clear_cache_dir", "env", "freeze", "gen_jit_spec", "stats", "subscribe", *_LATE]


def clear_cache_dir() -> None:
    """Remove everything built into the workspace. Prebuilt modules stay, and so do modules already loaded."""
    from .gc import PATIENCE, lock_name  # what removes, and its lock, are imported when something is removed
    from .host.lock import alone

    root = workspace_root()
    with alone(lock_name(root), PATIENCE):
        for part in PARTS:
            shutil.rmtree(root / part, ignore_errors=True)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        with process.one_step():
            return getattr(importlib.import_module(f".{_LATE[name]}", __package__), name)
    # Each family's gen_*_module is found in its own file; names that FlashInfer has besides are at its address.
    if name.startswith(("gen_", "get_")):
        for family in modules.families():
            module = modules.family(family)
            if name in vars(module):
                return getattr(module, name)
        addresses = importlib.import_module(".attention", __package__)
        if name in addresses.__all__:
            return getattr(addresses, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
