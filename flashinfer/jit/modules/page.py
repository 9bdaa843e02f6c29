"""Modules of the page family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec, family_spec
from . import Matrix


def gen_page_module(backend: str = "cuda") -> JitSpec:
    """Appending to paged caches, and the indices that go with them. Bytes are moved: one module serves every dtype."""
    return family_spec("page", backend)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_page_module(backend)
