"""Modules of the delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_delta_rule_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """The delta rule, gated and not, for the element types ``dtypes``."""
    backend = device_of(device)
    spec = family_spec("delta_rule", backend, coverage={"dtype": subset("dtypes", dtypes, DTYPES)})
    return replace(spec, split=backend == "cuda")  # the kernels of an element type take ten seconds


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_delta_rule_module(backend, matrix["dtypes"])
