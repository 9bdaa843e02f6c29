"""Modules of the group_quant family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_group_quant_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module that quantises groups of inputs of ``dtypes`` to 8 bits."""
    return family_spec("group_quant", device_of(device), coverage={"dtype": subset("dtypes", dtypes, DTYPES)})


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_group_quant_module(backend, matrix["dtypes"])
