"""FlashInfer's address of what describes attention: ``gen_*_module`` of decode and prefill, and ``get_*_uri``.

A uri is a module's name: ``get_single_decode_uri(...)`` is ``gen_single_decode_module(...).name``.
"""

from __future__ import annotations

import re
from typing import Any

from .modules import decode, prefill

_GENERATORS = {
    name: function
    for module in (decode, prefill)
    for name, function in vars(module).items()
    if re.fullmatch(r"gen_\w+_module", name)
}
__all__ = sorted([*_GENERATORS, *(f"get_{name[4:-7]}_uri" for name in _GENERATORS if "customize" not in name)])


def __getattr__(name: str) -> Any:
    if name in _GENERATORS:
        return _GENERATORS[name]
    if name in __all__:
        generator = _GENERATORS[f"gen_{name[4:-4]}_module"]
        return lambda *args, **kwargs: generator(*args, **kwargs).name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
