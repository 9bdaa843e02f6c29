"""Operators that load their module on the first call.

An operator is declared here once, with schema, fake implementation and one Python kernel for every device. The kernel
loads the module of the tensors' device and calls the operator again. The module registers its C++ kernel for that
device's dispatch key. The C++ kernel takes precedence, so later calls run no Python.

``configured.py`` has the operators with one module per configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..jit.load import load
from ..jit.lookup import Needs
from ..jit.module import JitSpec
from ..jit.native import module_for_gpus
from ..jit.spec import BACKENDS
from . import registry
from .errors import check_dense, check_one_device, on_copies, on_one_device, type_error, value_error
from .route import Fallback, Gradient, routed

OPERATORS: dict[str, Callable[..., Any]] = {}  # name -> torch operator; tests cover all of them


def define_in_python(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] = lambda *_: None,
    *,
    gradient: Gradient | None = None,
    on_host: tuple[str, ...] = (),
    namespace: str = "flashinfer",
) -> Any:
    """Declare ``flashinfer::<schema>`` with a Python function as its kernel on every device. Return the operator.

    Graphs do not trace into the function. The arguments are those of :func:`define`.
    """
    name, library = registry.register(namespace, schema, function), registry.library(namespace)
    operator = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in operator._schema.arguments]
    host = frozenset(n for n, argument in enumerate(names) if argument in on_host)
    fake = on_one_device(name, names, fake, host)
    if operator._schema.is_mutable:
        library.impl(name, on_copies(operator), "Negative")
    if on_host:
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    else:
        # Not register_fake: it reads the caller's source, which takes half of the import time of this package, and it
        # permits tensors on several devices.
        library.impl(name, fake, "Meta")
    if gradient is not None:
        torch.library.register_autograd(
            f"{namespace}::{name}", gradient.backward, setup_context=gradient.setup_context, lib=library
        )
    OPERATORS[name if namespace == "flashinfer" else f"{namespace}::{name}"] = operator
    return operator


def element_type(spec: JitSpec, *args: Any) -> Needs:
    """Return the coverage that a call needs: the first dtype of its tensors that the spec covers."""
    dtypes = dict(spec.coverage).get("dtype", ())
    names = (str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor))
    return next(({"dtype": (name,)} for name in names if name in dtypes), {})


def define(
    schema: str,
    module: Callable[[str], JitSpec],
    fake: Callable[..., Any] = lambda *_: None,
    *,
    fallback: Fallback | None = None,
    gradient: Gradient | None = None,
    on_host: tuple[str, ...] = (),
    needs: Callable[..., Needs] = element_type,
    kernels: str | None = None,
) -> Callable[..., Any]:
    """Declare ``flashinfer::<schema>`` and return a function that calls it.

    Args:
        schema: in torch's language, with exact mutation annotations.
        module: maps a backend to the spec of the module that registers the operator's kernel.
        fake: returns the operator's results as tensors without data. The default is for operators without results.
        fallback: replaces the operator for calls with gradients or symbolic numbers.
        gradient: backward formula, for operators for training. Such operators run Python before every call.
        on_host: arguments that stay on the host, such as tables, next to tensors on a device.
        needs: maps the spec and the arguments to the coverage that a call needs, as axis -> values.
        kernels: selects the module. ``None``: the module for the GPUs' arch if the family has one, otherwise the
            portable module. ``""``: the portable module. ``"sm90a"`` or another arch: the module for that arch.
            The operator's namespace is then ``flashinfer_sm90a``.

    The returned function raises ``ValueError`` and ``TypeError`` if the operator rejects an argument.
    """
    name = schema[: schema.index("(")]
    namespace = f"flashinfer_{kernels}" if kernels else "flashinfer"

    def load_and_call_again(*args: Any) -> Any:
        backend = _checked_backend(name, operator, args, host)
        spec = module(backend)
        if backend == "cuda" and kernels is None:
            spec = module_for_gpus(spec)
        if not _has_kernel(operator, backend):
            load(spec, needs(spec, *args))
        if not _has_kernel(operator, backend):
            raise RuntimeError(f"module {spec.name!r} is loaded and registers no kernel for {operator._name}")
        return operator(*args)

    operator = define_in_python(
        schema, load_and_call_again, fake, gradient=gradient, on_host=on_host, namespace=namespace
    )
    host = frozenset(n for n, argument in enumerate(operator._schema.arguments) if argument.name in on_host)
    return routed(name, operator, fallback)


def _checked_backend(name: str, operator: Any, args: tuple[Any, ...], on_host: frozenset[int]) -> str:
    """Return the backend of a call's tensors. Refuse devices without kernels, on which the call would recurse."""
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    tensors = [arg for position, arg in enumerate(args) if isinstance(arg, torch.Tensor) and position not in on_host]
    if not tensors:
        argument = next(arg.name for arg in arguments if str(arg.type) == "Tensor")
        raise type_error(name, argument, None, "Tensor")
    backend = tensors[0].device.type
    if backend not in BACKENDS:
        position = next(n for n, arg in enumerate(args) if arg is tensors[0])
        raise value_error(name, names[position], f"a tensor on {backend}", f"one on {', '.join(BACKENDS)}")
    check_one_device(name, names, args, on_host)
    check_dense(name, names, args)
    return str(backend)


def _has_kernel(operator: Any, backend: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator._name.partition(".")[0], backend.upper())
