"""Modules of the page family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_page_module(device: object = None) -> JitSpec:
    """Appending to paged caches, and the indices that go with them. Bytes are moved: one module serves every dtype."""
    return family_spec("page", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_page_module(backend)
