"""Modules of the sampling family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_sampling_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of sampling, softmax, filters and speculative verification for ``dtypes``."""
    backend = device_of(device)
    spec = family_spec("sampling", backend, coverage={"dtype": subset("dtypes", dtypes, DTYPES)})
    # Kernels with long compile times have separate files, which compile in parallel.
    names = (
        "candidates", "candidate_maps", "cluster_smem", "nucleus", "samples", "streamed_samples", "maps", "streamed_maps",
        "masks", "top_k",
    )  # fmt: skip
    parts = [f"csrc/sampling/{name}.cu" for name in names] if backend == "cuda" else []
    return replace(spec, sources=(*spec.sources[:-1], *parts, spec.sources[-1]))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_sampling_module(backend, matrix["dtypes"])
