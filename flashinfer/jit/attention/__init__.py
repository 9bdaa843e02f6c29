"""FlashInfer's import path of the functions in ``pytorch``: ``gen_*_module`` and ``get_*_uri`` of attention."""

from __future__ import annotations

from typing import Any

from . import pytorch

__all__ = pytorch.__all__


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(pytorch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
