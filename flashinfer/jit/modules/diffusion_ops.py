"""Modules of the diffusion_ops family."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_diffusion_ops_module(device: object = None) -> JitSpec:
    """Return the module of fused operators of diffusion models, for bfloat16."""
    return family_spec("diffusion_ops", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_diffusion_ops_module(backend)
