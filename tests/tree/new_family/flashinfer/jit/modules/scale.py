"""Modules of the scale family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Axis, Matrix, device_of, some_of, subset
from ._family import family_spec, kernels_of

POWERS = ("1", "2", "3")
AXES = (DTYPE_AXIS, Axis("powers", POWERS[:2], some_of(*POWERS), "how often scaled() multiplies"))


def gen_scale_module(
    device: object = None, dtypes: Iterable[str] = DTYPES, powers: Iterable[str] = POWERS, kernels: str = ""
) -> JitSpec:
    """Return the module of scaling for ``dtypes`` and ``powers``. ``kernels``: ``"sm90a"`` for Hopper's."""
    coverage = {"dtype": subset("dtypes", dtypes, DTYPES), "power": subset("powers", powers, POWERS)}
    return family_spec("scale", kernels or device_of(device), coverage=coverage)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for kernels in kernels_of("scale", matrix["backends"]):
        yield gen_scale_module(dtypes=matrix["dtypes"], powers=matrix["powers"], kernels=kernels)
