"""Modules of the scale family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Axis, Matrix, device_of, some_of, subset
from ._family import family_spec

POWERS = ("1", "2", "3")
AXES = (DTYPE_AXIS, Axis("powers", POWERS[:2], some_of(*POWERS), "how often scaled() multiplies"))


def gen_scale_module(device: object = None, dtypes: Iterable[str] = DTYPES, powers: Iterable[str] = POWERS) -> JitSpec:
    """Return the module of scaling for ``dtypes`` and ``powers``."""
    coverage = {"dtype": subset("dtypes", dtypes, DTYPES), "power": subset("powers", powers, POWERS)}
    return family_spec("scale", device_of(device), coverage=coverage)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_scale_module(backend, matrix["dtypes"], matrix["powers"])
