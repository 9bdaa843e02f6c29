"""Modules of the rope_quant family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_rope_quant_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of rotary embedding with 8-bit outputs, also into a paged cache, for ``dtypes``."""
    return family_spec("rope_quant", device_of(device), coverage={"dtype": subset("dtypes", dtypes, DTYPES)})


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_rope_quant_module(backend, matrix["dtypes"])
