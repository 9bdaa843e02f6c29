"""Names and interfaces that exist only because FlashInfer or a serving engine has them.

The modules of the package with these names only import from here: ``flashinfer.kda`` has the functions of
``flashinfer._compat.kda``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def elsewhere(module: str, addresses: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that imports a name's own module when the name is used.

    Args:
        module: the ``__name__`` of the module that has the address.
        addresses: name -> the module of this package that defines it.
    """

    def __getattr__(name: str) -> Any:
        if name not in addresses:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"flashinfer.{addresses[name]}"), name)

    return __getattr__
