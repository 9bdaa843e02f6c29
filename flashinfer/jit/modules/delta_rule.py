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
    """Return the module of the delta rule, gated or not, for the element types ``dtypes``."""
    backend = device_of(device)
    values = subset("dtypes", dtypes, DTYPES)
    spec = family_spec("delta_rule", backend, coverage={"dtype": values})
    if backend != "cuda":
        return spec
    # The chunked kernels have separate files, because each takes ten seconds to compile. They serve 16-bit types only.
    halves = [dtype for dtype in values if dtype != "float32"]
    kinds = ("chunks_{}", "wide_{}", "channels_{}_64", "channels_{}_128")
    chunks = (f"csrc/delta_rule/{kind.format(dtype)}.cu" for dtype in halves for kind in kinds)
    return replace(spec, sources=(*spec.sources[:-1], *chunks, spec.sources[-1]), split=True)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_delta_rule_module(backend, matrix["dtypes"])
