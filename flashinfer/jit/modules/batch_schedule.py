"""Modules of the batch_schedule family, which schedules attention on the device."""

from __future__ import annotations

from collections.abc import Iterator

from ..module import JitSpec
from . import Matrix, device_of
from ._family import family_spec


def gen_batch_schedule_module(device: object = None) -> JitSpec:
    """Return the module that schedules batches. One module serves every configuration of attention."""
    return family_spec("batch_schedule", device_of(device))


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        yield gen_batch_schedule_module(backend)
