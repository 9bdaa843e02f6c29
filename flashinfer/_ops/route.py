"""Dispatch of a call to its inference operator, or to a fallback for gradients and symbolic numbers.

Inference operators have no autograd kernel, because it would run Python before every call. Calls with gradients, and
calls in graphs with symbolic numbers, go to :class:`Fallback`.
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
from .errors import called, raise_as_callers_mistake
from .scalars import is_symbolic
from .tensors import check_metadata

# Call an operator by its handle. A call of the operator object calls this function too, but takes 0.4 us longer. Dynamo
# does not support this function, and it ignores __torch_function__ of tensor subclasses.
call_handle: Callable[..., Any] = torch._C._dispatch_call_boxed


@dataclass(frozen=True)
class Gradient:
    """The backward formula of an operator, as ``torch.library.register_autograd`` takes it."""

    setup_context: Callable[..., None]
    backward: Callable[..., Any]


def no_second_derivative(name: str) -> Gradient:
    """Return a backward formula that raises ``GradientError``, for operators that compute gradients."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise GradientError(f"{name}: has no gradient: second derivatives are not implemented")

    return Gradient(setup_context, backward)


@dataclass(frozen=True)
class Fallback:
    """Replacement of an inference operator in calls with gradients or symbolic numbers.

    ``call`` takes the operator's arguments. It replaces the operator if a tensor of ``differentiable`` requires a
    gradient, or if a number of ``scalars`` is symbolic under ``torch.compile``.
    """

    call: Callable[..., Any]
    differentiable: tuple[str, ...]
    scalars: tuple[str, ...] = ()


def without_gradient(name: str, *differentiable: str) -> Fallback:
    """Return a :class:`Fallback` that raises ``GradientError``. Without it, gradients would be missing silently."""

    def refuse(*_: Any) -> NoReturn:
        raise GradientError(f"{called(name)}: has no gradient, wanted tensors that require none, or torch.no_grad()")

    return Fallback(refuse, differentiable)


def routed(name: str, operator: Any, fallback: Fallback | None) -> Callable[..., Any]:
    """Return a function that calls ``operator``, or ``fallback`` if gradients or symbolic numbers require it.

    It raises ``ValueError`` and ``TypeError`` if the operator rejects an argument.
    """
    direct = partial(call_handle, operator._handle)
    names = [argument.name for argument in operator._schema.arguments]
    differentiable = sorted(names.index(one) for one in fallback.differentiable) if fallback else []
    # Unrolled for three tensors, because a loop would double the cost. Positions are sorted, so only `first` can be 0.
    # In `second` and `third`, 0 means absent.
    first, second, third = (*differentiable, 0, 0, 0)[:3]
    others = differentiable[3:]
    scalars = tuple(names.index(one) for one in fallback.scalars) if fallback else ()

    def call(*args: Any) -> Any:
        try:
            gradients = (
                fallback
                and is_grad_enabled()
                and (
                    args[first].requires_grad
                    or (second and (x := args[second]) is not None and x.requires_grad)
                    or (third and (x := args[third]) is not None and x.requires_grad)
                    or (others and any((x := args[other]) is not None and x.requires_grad for other in others))
                )
            )
        except AttributeError:  # None for the first tensor. The operator rejects everything else.
            gradients = any(getattr(args[one], "requires_grad", False) for one in differentiable)
        try:
            if gradients:
                return fallback.call(*args)  # type: ignore[union-attr]
            if is_dynamo_compiling():
                for position in scalars:
                    if fallback and is_symbolic(args[position]):
                        return fallback.call(*args)
                return operator(*args)
            if has_torch_function(args):
                return operator(*args)
            return direct(*args)
        except RuntimeError as err:
            raise_as_callers_mistake(err, names=names, args=args)

    call.__name__ = call.__qualname__ = name
    return call


def write(operator: str, argument: str, out: torch.Tensor, result: torch.Tensor) -> None:
    """Copy ``result`` into ``out``. Autograd records the copy.

    Raises:
        ValueError, TypeError: another shape, device or dtype, which ``copy_`` would accept and convert.
    """
    check_metadata(operator, argument, out, result.shape, result.device, result.dtype)
    out.copy_(result)
