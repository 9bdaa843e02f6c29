"""Modules of grouped GEMM with MXFP4 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec, parts_of


def gen_mxfp4_gemm_module(device: object = None) -> JitSpec:
    """Return the module of grouped GEMM with rows of 16 bits and MXFP4 matrices."""
    backend = device_of(device)
    spec = family_spec("mxfp4_gemm", backend)
    # Each file of the folder has the kernels for one type. They compile in parallel.
    parts = parts_of("mxfp4_gemm") if backend == "cuda" else ()
    return replace(spec, sources=(*spec.sources[:-1], *parts, spec.sources[-1]))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_mxfp4_gemm_module(backend)
