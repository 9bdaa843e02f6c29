"""One file per family: its ``gen_*_module`` functions and ``aot_specs``, the family's share of the AOT matrix.

A family is found by its file being here; nothing lists them. Files whose names start with ``_`` serve several.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from ..module import JitSpec
from ..spec import BACKENDS, DTYPES


@dataclass(frozen=True)
class Matrix:
    """What to build ahead of time. Families take from it what they depend on."""

    backends: tuple[str, ...] = BACKENDS
    dtypes: tuple[str, ...] = DTYPES
    # Attention alone: sizes of heads (192:128 of queries and values), dtypes of keys ("same": the queries'), variants.
    head_dims: tuple[str, ...] = ("64", "128", "256")
    kv_dtypes: tuple[str, ...] = ("same",)
    variants: tuple[str, ...] = ("default",)
    attention_form: str = "specialised"  # a module of each configuration; "dispatching": one of them all


@cache
def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def family(name: str) -> ModuleType:
    """The module that describes a family.

    Raises:
        ValueError: there is no such family.
    """
    if name not in families():
        raise ValueError(f"family: got {name!r}, wanted one of {', '.join(families())}")
    return importlib.import_module(f"{__name__}.{name}")


def matrix_specs(matrix: Matrix, names: Iterable[str] = ()) -> list[JitSpec]:
    """The specs of the named families (of all, where none is named) for a matrix, sorted by name."""
    return sorted(
        (spec for name in names or families() for spec in family(name).aot_specs(matrix)), key=lambda s: s.name
    )
