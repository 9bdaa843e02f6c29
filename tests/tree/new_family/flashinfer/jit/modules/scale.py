"""Modules of the scale family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec, family_spec
from ..spec import DTYPES
from . import Matrix


def gen_scale_module(backend: str = "cuda", dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Scaling for the element types ``dtypes``."""
    return family_spec("scale", backend, coverage={"dtype": dtypes})


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix.backends:
        yield gen_scale_module(backend, matrix.dtypes)
