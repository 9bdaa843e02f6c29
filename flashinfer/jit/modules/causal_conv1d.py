"""Modules of the causal convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_causal_conv1d_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """The causal convolution and its step for the element types ``dtypes``."""
    backend = device_of(device)
    spec = family_spec("causal_conv1d", backend, coverage={"dtype": subset("dtypes", dtypes, DTYPES)})
    return replace(spec, split=backend == "cuda")  # the kernels of an element type take seconds


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_causal_conv1d_module(backend, matrix["dtypes"])
