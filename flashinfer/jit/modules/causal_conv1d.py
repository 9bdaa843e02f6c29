"""Modules of the causal convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_causal_conv1d_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of the causal convolution and its decode step for the element types ``dtypes``."""
    return family_spec("causal_conv1d", device_of(device), coverage={"dtype": subset("dtypes", dtypes, DTYPES)})


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_causal_conv1d_module(backend, matrix["dtypes"])
