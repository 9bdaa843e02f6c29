"""Which operator a call goes to: that of inference, or a general one where gradients or symbolic numbers ask for it.

An operator of inference has no kernel for autograd, which would be Python before every call. A call that wants
gradients goes to another operator, that of :class:`General`, and so does one whose numbers a graph keeps symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from ..errors import GradientError
from .errors import raise_as_callers_mistake
from .scalars import is_symbolic
from .tensors import check_form

# The dispatcher's own call of an operator's handle: what calling the operator ends in, 0.4 us earlier. It is not for
# Dynamo, which knows operators only, nor for tensors whose class has a __torch_function__.
call_handle: Callable[..., Any] = torch._C._dispatch_call_boxed


@dataclass(frozen=True)
class Gradient:
    """The backward formula of an operator, as ``torch.library.register_autograd`` takes it."""

    setup_context: Callable[..., None]
    backward: Callable[..., Any]


def no_second_derivative(name: str) -> Gradient:
    """Returns the gradient of an operator that is a gradient itself: an error."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise GradientError(f"{name}: has no gradient: second derivatives are not implemented")

    return Gradient(setup_context, backward)


@dataclass(frozen=True)
class General:
    """Does for a call what an operator without gradients and with numbers for arguments cannot do.

    ``call`` takes the operator's arguments. It is taken where one of the tensors named by ``differentiable`` wants a
    gradient, or a number named by ``scalars`` is symbolic under ``torch.compile``.
    """

    call: Callable[..., Any]
    differentiable: tuple[str, ...]
    scalars: tuple[str, ...] = ()


def without_gradient(name: str, *differentiable: str) -> General:
    """Refuses gradients of an operator of inference: an error is better than a gradient that is silently none."""

    def refuse(*_: Any) -> NoReturn:
        raise GradientError(f"{name}: has no gradient, wanted tensors that require none, or torch.no_grad()")

    return General(refuse, differentiable)


def routed(name: str, operator: Any, general: General | None) -> Callable[..., Any]:
    """A function that calls ``operator``, or ``general`` where that is asked for.

    It raises ``ValueError`` and ``TypeError`` where the operator reports a caller's mistake.
    """
    direct = partial(call_handle, operator._handle)
    names = [argument.name for argument in operator._schema.arguments]
    differentiable = sorted(names.index(one) for one in general.differentiable) if general else []
    # Written out for three, where a loop would cost as much as what it does; 0 stands for no second and no third.
    first, second, third = (*differentiable, 0, 0, 0)[:3]
    others = differentiable[3:]
    scalars = tuple(names.index(one) for one in general.scalars) if general else ()

    def call(*args: Any) -> Any:
        try:
            gradients = (
                general
                and is_grad_enabled()
                and (
                    args[first].requires_grad
                    or (second and args[second].requires_grad)
                    or (third and args[third].requires_grad)
                    or (others and any(args[other].requires_grad for other in others))
                )
            )
        except AttributeError:  # None, which may stand for an optional tensor; the operator refuses everything else
            gradients = any(getattr(args[one], "requires_grad", False) for one in differentiable)
        try:
            if gradients:
                return general.call(*args)  # type: ignore[union-attr]
            if is_dynamo_compiling():
                for position in scalars:
                    if general and is_symbolic(args[position]):
                        return general.call(*args)
                return operator(*args)
            if has_torch_function(args):
                return operator(*args)
            return direct(*args)
        except RuntimeError as err:
            raise_as_callers_mistake(err, names=names, args=args)

    call.__name__ = call.__qualname__ = name
    return call


def write(operator: str, argument: str, out: torch.Tensor, result: torch.Tensor) -> None:
    """``result`` into ``out`` in a way that autograd follows.

    Raises:
        ValueError, TypeError: another shape, device or dtype, which torch would convert.
    """
    check_form(operator, argument, out, result.shape, result.device, result.dtype)
    out.copy_(result)
