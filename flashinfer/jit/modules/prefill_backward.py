"""Modules of the gradients of the prefill family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..spec import DTYPES, JitSpec, family_spec
from . import Matrix


def gen_prefill_backward_module(backend: str = "cpu", dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Gradients of attention for the element types ``dtypes``, whatever sizes heads have.

    Raises:
        ValueError: ``backend`` is not ``cpu``: on CUDA gradients are compositions of torch's functions.
    """
    if backend != "cpu":
        raise ValueError(
            f"backend: got {backend!r}, wanted 'cpu': there are no kernels of gradients of attention beside"
        )
    return family_spec("prefill_backward", backend, coverage={"dtype": dtypes})


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    if "cpu" in matrix.backends:
        yield gen_prefill_backward_module("cpu", matrix.dtypes)
