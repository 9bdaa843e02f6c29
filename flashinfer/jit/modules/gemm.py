"""Modules of the gemm family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec, parts_of


def gen_gemm_module(device: object = None) -> JitSpec:
    """Return the module of grouped GEMM for all element types. Group sizes are read on the device."""
    backend = device_of(device)
    spec = family_spec("gemm", backend)
    # Each file of the folder has the kernels for one pair of types. The files compile in parallel.
    parts = parts_of("gemm") if backend == "cuda" else ()
    return replace(spec, sources=(*spec.sources[:-1], *parts, spec.sources[-1]))


def gen_gemm_sm90_module() -> JitSpec:
    """Return :func:`gen_gemm_module` for CUDA. FlashInfer has one module for each arch, this tree one for all."""
    return gen_gemm_module("cuda")


def gen_gemm_sm100_module() -> JitSpec:
    """Return :func:`gen_gemm_module` for CUDA, like :func:`gen_gemm_sm90_module`."""
    return gen_gemm_module("cuda")


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_gemm_module(backend)
