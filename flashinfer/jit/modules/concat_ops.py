"""Modules of the concat_ops family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_concat_ops_module(device: object = None) -> JitSpec:
    """Return the module that concatenates MLA keys. It copies bytes, so one module serves every dtype."""
    return family_spec("concat_ops", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_concat_ops_module(backend)
