"""Modules of the activation family, one per activation function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..module import JitSpec
from ..spec import DTYPES
from . import DTYPE_AXIS, Matrix, device_of, subset
from ._family import family_spec

AXES = (DTYPE_AXIS,)
# Name of the function -> its functor in include/flashinfer/common/activation.h.
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh"}


def gen_act_and_mul_module(act_func_name: str, device: object = None, dtypes: Iterable[str] = DTYPES) -> JitSpec:
    """Return the module of ``<act_func_name>_and_mul`` for the element types ``dtypes``.

    Raises:
        ValueError: no such function, backend or element type.
    """
    return activation_spec("activation", act_func_name, device_of(device), dtypes)


def activation_spec(family: str, act_func_name: str, backend: str, dtypes: Iterable[str]) -> JitSpec:
    if act_func_name not in ACTIVATIONS:
        raise ValueError(f"act_func_name: got {act_func_name!r}, wanted one of {', '.join(ACTIVATIONS)}")
    return family_spec(
        family,
        backend,
        variant=act_func_name,
        config={"ACTIVATION": ACTIVATIONS[act_func_name], "ACTIVATION_OP": f'"{act_func_name}_and_mul"'},
        coverage={"dtype": subset("dtypes", dtypes, DTYPES)},
    )


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for backend in matrix["backends"]:
        for name in ACTIVATIONS:
            yield gen_act_and_mul_module(name, backend, matrix["dtypes"])
