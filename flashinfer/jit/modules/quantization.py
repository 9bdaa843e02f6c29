"""Modules of the quantization family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_quantization_module(device: object = None) -> JitSpec:
    """Return the module that packs booleans into bits."""
    return family_spec("quantization", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_quantization_module(backend)
