"""Modules of the page family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_page_module(device: object = None) -> JitSpec:
    """Return the module that appends to paged caches. It copies bytes, so one module serves every dtype."""
    return family_spec("page", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_page_module(backend)
