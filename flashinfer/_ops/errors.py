"""A refusal of an operator becomes an exception of Python that names the operator, the argument, got and wanted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch

from ..jit.spec import BACKENDS

_KINDS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "OutOfMemoryError": torch.OutOfMemoryError,  # what engines catch, a RuntimeError
    "TypeError": TypeError,
    "ValueError": ValueError,
}


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


def raise_from_module(op: str, args: Sequence[Any], err: RuntimeError) -> NoReturn:
    """Names what a configuration's module did not take: ``define`` looks at such tensors, a module does not.

    Raises:
        ValueError: tensors that are not dense, or on several devices.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(f"{op}: got a tensor of {tensor.layout}, wanted dense ones") from None
    check_one_device(op, args)
    raise_as_callers_mistake(err)


def check_one_device(op: str, args: Sequence[Any], on_host: frozenset[int] = frozenset()) -> None:
    """All tensors are on one device, but for those at the positions ``on_host``, which are tables on the host.

    Raises:
        ValueError: they are not.
    """
    given = (arg for position, arg in enumerate(args) if position not in on_host)
    devices = dict.fromkeys(str(arg.device) for arg in given if isinstance(arg, torch.Tensor))
    if len(devices) > 1:
        raise ValueError(f"{op}: got tensors on {', '.join(devices)}, wanted one device for all")


def on_one_device(op: str, fake: Callable[..., Any], on_host: frozenset[int] = frozenset()) -> Callable[..., Any]:
    """``fake`` for tensors of one device alone.

    One tensor on meta is enough for torch to call a fake implementation, and what that returns has no data.
    """

    @wraps(fake)
    def checked(*args: Any) -> Any:
        check_one_device(op, args, on_host)
        return fake(*args)

    return checked


def check_dense(op: str, names: Sequence[str], args: Sequence[Any]) -> None:
    """No tensor is sparse, quantized or the like: no module has a kernel for those.

    Raises:
        ValueError: one is.
    """
    for name, arg in zip(names, args, strict=True):
        if not isinstance(arg, torch.Tensor) or arg.device.type not in BACKENDS:
            continue  # which devices there are kernels for is another check's
        if not torch._C._dispatch_keys(arg).has(getattr(torch._C.DispatchKey, arg.device.type.upper())):
            raise ValueError(f"{op}: {name}: got a tensor of {arg.layout} and {arg.dtype}, wanted a dense one")
