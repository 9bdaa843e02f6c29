"""Modules of the gemm family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_gemm_module(device: object = None) -> JitSpec:
    """Grouped products of every element type; group sizes are read on the device."""
    return family_spec("gemm", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        if backend == "cpu":
            yield gen_gemm_module(backend)
