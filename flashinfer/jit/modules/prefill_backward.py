"""Modules of the gradients of the prefill family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._attention import CONSTANTS
from ._family import family_spec, parts_of

AXES = (DTYPE_AXIS,)
# Head sizes of the CUDA kernels. Each size is a separate translation unit.
CUDA_HEAD_DIMS = ("64", "128", "192:128", "256")
MAX_CUDA_HEAD_DIM = 256


def gen_prefill_backward_module(device: object = None, dtypes: Iterable[str] | None = None) -> JitSpec:
    """Return the module of the gradients of attention: all head sizes on the CPU, up to 256 on CUDA.

    Raises:
        ValueError: there are no kernels for a dtype. CUDA supports float16 and bfloat16.
    """
    backend = device_of(device)
    if backend != "cuda":
        return family_spec(
            "prefill_backward",
            backend,
            coverage={"dtype": subset("dtypes", DTYPES if dtypes is None else dtypes, DTYPES)},
        )
    values = subset("dtypes", DTYPES[1:] if dtypes is None else dtypes, DTYPES)
    if "float32" in values:
        raise ValueError("dtypes: got float32, wanted float16 or bfloat16 on cuda, which has no other kernels")
    coverage = {"dtype": values, "head_dims": CUDA_HEAD_DIMS}
    spec = family_spec("prefill_backward", backend, coverage=coverage, config={"head_dims": CONSTANTS["head_dims"]})
    # The module contains kernels for all archs, because they are selected by each call.
    parts = parts_of("prefill_backward")
    return replace(spec, sources=(*spec.sources[:-1], *parts, spec.sources[-1]), split=True)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        dtypes = [dtype for dtype in matrix["dtypes"] if backend == "cpu" or dtype != "float32"]
        if dtypes:
            yield gen_prefill_backward_module(backend, dtypes)
