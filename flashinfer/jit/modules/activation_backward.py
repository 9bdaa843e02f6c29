"""Modules of the gradients of the activation family, one per activation function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of
from .activation import ACTIVATIONS, activation_spec

AXES = (DTYPE_AXIS,)


def gen_act_and_mul_backward_module(
    act_func_name: str, device: object = None, dtypes: Iterable[str] = DTYPES
) -> JitSpec:
    """Return the module of the gradient of ``<act_func_name>_and_mul`` for the element types ``dtypes``.

    Raises:
        ValueError: no such function, backend or element type.
    """
    return activation_spec("activation_backward", act_func_name, device_of(device), dtypes)


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        for name in ACTIVATIONS:
            yield gen_act_and_mul_backward_module(name, backend, matrix["dtypes"])
