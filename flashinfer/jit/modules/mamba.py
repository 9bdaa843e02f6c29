"""Modules of Mamba."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_mamba_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of a step of Mamba's state space model for the element types ``dtypes``."""
    backend = device_of(device)
    spec = family_spec("mamba", backend, coverage={"dtype": subset("dtypes", dtypes, DTYPES)})
    return replace(spec, split=True) if backend == "cuda" else spec


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_mamba_module(backend, matrix["dtypes"])
