"""Operators that load themselves.

An operator is declared here once: schema, fake implementation, and one Python kernel for every device, which loads
the module of the tensors' device and calls the operator again. The module registers its C++ kernel at that
device's key, which wins from then on: after the first call no Python is left on the path.

Nor has such an operator a kernel for autograd, which would be Python before every call. A call that wants gradients
goes to another operator, that of :class:`General`, and so does one whose numbers a graph keeps symbolic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from ..errors import GradientError
from ..jit.load import load
from ..jit.module import JitSpec
from ..jit.spec import BACKENDS, DTYPES
from .route import is_symbolic

_LIBRARY = torch.library.Library("flashinfer", "FRAGMENT")
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}

# The dispatcher's own call of an operator's handle: what calling the operator ends in, 0.4 us earlier. It is not for
# Dynamo, which knows operators only, nor for tensors whose class has a __torch_function__.
call_handle: Callable[..., Any] = torch._C._dispatch_call_boxed

OPERATORS: dict[str, Callable[..., Any]] = {}  # name -> the torch operator, for tests that must not forget one


@dataclass(frozen=True)
class Gradient:
    """The backward formula of an operator, as ``torch.library.register_autograd`` takes it."""

    setup_context: Callable[..., None]
    backward: Callable[..., Any]


def no_second_derivative(name: str) -> Gradient:
    """Of an operator that is a gradient itself."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise GradientError(f"{name}: has no gradient: second derivatives are not implemented")

    return Gradient(setup_context, backward)


@dataclass(frozen=True)
class General:
    """What a call does that an operator without gradients and with numbers for arguments cannot do.

    ``call`` takes the operator's arguments. It is taken where one of the tensors named by ``differentiable`` wants a
    gradient, or a number named by ``scalars`` is symbolic under ``torch.compile``.
    """

    call: Callable[..., Any]
    differentiable: tuple[str, ...]
    scalars: tuple[str, ...] = ()


def without_gradient(name: str, *differentiable: str) -> General:
    """Of an operator that training has no use for: better an error than a gradient that is silently none."""

    def refuse(*_: Any) -> NoReturn:
        raise GradientError(f"{name}: has no gradient, wanted tensors that require none, or torch.no_grad()")

    return General(refuse, differentiable)


def define_in_python(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] = lambda *_: None,
    *,
    gradient: Gradient | None = None,
    devices_differ: bool = False,
) -> Any:
    """Declare ``flashinfer::<schema>``, whose kernel is a Python function on every device, and return the operator.

    A graph does not look into it: that is what it is for. The arguments are those of :func:`define`.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if devices_differ:
        torch.library.register_fake(f"flashinfer::{name}", fake, lib=_LIBRARY)
    else:
        # What register_fake would do, less its look at the caller's source, which takes half of the import of this
        # package, and less its leave for tensors of several devices.
        _LIBRARY.impl(name, fake, "Meta")
    if gradient is not None:
        torch.library.register_autograd(
            f"flashinfer::{name}", gradient.backward, setup_context=gradient.setup_context, lib=_LIBRARY
        )
    OPERATORS[name] = getattr(torch.ops.flashinfer, name).default
    return OPERATORS[name]


def define(
    schema: str,
    module: Callable[[str], JitSpec],
    fake: Callable[..., Any],
    *,
    general: General | None = None,
    gradient: Gradient | None = None,
    devices_differ: bool = False,
) -> Callable[..., Any]:
    """Declare ``flashinfer::<schema>`` and return a function that calls it.

    Args:
        schema: in torch's language, with exact mutation annotations.
        module: backend -> the spec of the module that registers the operator's kernel.
        fake: what the operator returns, as tensors without data.
        general: what the function returned does instead where gradients or symbolic numbers ask for it.
        gradient: the operator's own, for one that is not on the path of inference: it costs Python before every call.
        devices_differ: takes tables on the host beside tensors of a device.

    The function returned raises ``ValueError`` and ``TypeError`` where the operator reports a caller's mistake.
    """
    name = schema[: schema.index("(")]

    def load_and_call_again(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors:
            argument = next(arg.name for arg in operator._schema.arguments if str(arg.type) == "Tensor")
            raise TypeError(f"{name}: {argument}: got None, wanted Tensor")
        backend = tensors[0].device.type
        if backend not in BACKENDS:
            raise ValueError(f"{name}: got tensors on {backend}, wanted one of {', '.join(BACKENDS)}")
        if not devices_differ and any(tensor.device != tensors[0].device for tensor in tensors):
            devices = ", ".join(str(tensor.device) for tensor in tensors)
            raise ValueError(f"{name}: got tensors on {devices}, wanted one device for all")
        for declared, arg in zip(operator._schema.arguments, args, strict=True):
            if isinstance(arg, torch.Tensor) and not torch._C._dispatch_keys(arg).has(
                getattr(torch._C.DispatchKey, arg.device.type.upper())
            ):
                # No module has a kernel for those, and this one would be called again for ever.
                raise ValueError(
                    f"{name}: {declared.name}: got a tensor of {arg.layout} and {arg.dtype}, wanted a dense one"
                )
        dtype = next((_DTYPE_NAMES[tensor.dtype] for tensor in tensors if tensor.dtype in _DTYPE_NAMES), None)
        spec = module(backend)
        if not _has_kernel(name, backend):
            load(spec, {"dtype": (dtype,)} if dtype and "dtype" in dict(spec.coverage) else {})
        if not _has_kernel(name, backend):
            raise RuntimeError(f"module {spec.name!r} is loaded and registers no kernel for flashinfer::{name}")
        return operator(*args)

    operator = define_in_python(schema, load_and_call_again, fake, gradient=gradient, devices_differ=devices_differ)

    direct = partial(call_handle, operator._handle)
    names = [argument.name for argument in operator._schema.arguments]
    # Written out for three, where a loop would cost as much as what it does; 0 stands for no second and no third.
    differentiable = sorted(names.index(one) for one in general.differentiable) if general else []
    first, second, third = (*differentiable, 0, 0, 0)[:3]
    others = differentiable[3:]
    scalars = tuple(names.index(one) for one in general.scalars) if general else ()

    def call(*args: Any) -> Any:
        try:
            if (
                general
                and is_grad_enabled()
                and (
                    args[first].requires_grad
                    or (second and args[second].requires_grad)
                    or (third and args[third].requires_grad)
                    or (others and any(args[other].requires_grad for other in others))
                )
            ):
                return general.call(*args)
            if is_dynamo_compiling():
                for position in scalars:
                    if general and is_symbolic(args[position]):
                        return general.call(*args)
                return operator(*args)
            if has_torch_function(args):
                return operator(*args)
            return direct(*args)
        except AttributeError:
            return refused(*args)
        except RuntimeError as err:
            raise_as_callers_mistake(err)

    def refused(*args: Any) -> Any:
        """What is no tensor has no attributes of one: the operator says so in its way."""
        try:
            return operator(*args)
        except RuntimeError as err:
            raise_as_callers_mistake(err)

    call.__name__ = call.__qualname__ = name
    return call


def _has_kernel(name: str, backend: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"flashinfer::{name}", backend.upper())


def raise_as_callers_mistake(err: RuntimeError) -> NoReturn:
    """Bindings write the exception's name in front of a mistake of the caller's; torch's parser says it in its way."""
    text = str(err)
    kind, _, message = text.partition(": ")
    if kind in _KINDS:
        raise _KINDS[kind](message.split("\nException raised from")[0]) from None
    wrong_type = re.match(
        r"\w+::(\w+)\(\) Expected a value of type '([^']*)' for argument '(\w+)' but instead found type '([^']*)'",
        text,
    )
    if wrong_type is not None:
        op, wanted, argument, got = wrong_type.groups()
        raise TypeError(f"{op}: {argument}: got {got}, wanted {wanted}") from None
    raise err
