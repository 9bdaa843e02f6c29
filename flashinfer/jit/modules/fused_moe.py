"""Modules of mixtures of experts: routing, permutation, activation and sum. Their GEMMs belong to gemm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)


def gen_fused_moe_module(device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of routing, permutation, activation and sum for the element types ``dtypes``."""
    return family_spec("fused_moe", device_of(device), coverage={"dtype": subset("dtypes", dtypes, DTYPES)})


def gen_cutlass_fused_moe_sm90_module() -> JitSpec:
    """Return :func:`gen_fused_moe_module` for CUDA, by FlashInfer's name. Its kernels run on every GPU."""
    return gen_fused_moe_module("cuda")


def gen_fused_moe_sm100_module() -> JitSpec:
    """Return :func:`gen_fused_moe_module` for CUDA, by FlashInfer 0.2.7's name.

    Its kernels run on every GPU.
    """
    return gen_fused_moe_module("cuda")


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_fused_moe_module(backend, matrix["dtypes"])
