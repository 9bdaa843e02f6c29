"""Modules of the gemm family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import Matrix, device_of
from ._family import family_spec

FP8 = ("e4m3", "e5m2")
# Instances with kernels for Hopper.
HOPPER = (*(f"{dtype}_{layout}" for dtype in ("bfloat16", "float16") for layout in ("by_depth", "by_column")), "e4m3")


def gen_gemm_module(device: object = None) -> JitSpec:
    """Return the module of grouped GEMM for all element types. Group sizes are read on the device."""
    backend = device_of(device)
    spec = family_spec("gemm", backend)
    # Kernels of each pair of types have a file of their own, so that they compile in parallel.
    pairs = (f"{a}_{b}{scales}" for a in FP8 for b in FP8 for scales in ("", "_blocks"))
    parts = (*DTYPES, "gate", *pairs, *(f"sm90_{part}" for part in HOPPER)) if backend == "cuda" else ()
    return replace(spec, sources=(*spec.sources[:-1], *(f"csrc/gemm/{part}.cu" for part in parts), spec.sources[-1]))


def gen_gemm_sm90_module() -> JitSpec:
    """Return the module that serves Hopper, by FlashInfer's name. It serves every GPU."""
    return gen_gemm_module("cuda")


def gen_gemm_sm100_module() -> JitSpec:
    """Return the module that serves SM100, by FlashInfer's name. It serves every GPU."""
    return gen_gemm_module("cuda")


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_gemm_module(backend)
