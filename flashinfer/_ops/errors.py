"""Errors of operators as errors of the function that was called: its name, the argument, got and wanted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from ..jit.spec import BACKENDS

_KINDS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "OutOfMemoryError": torch.OutOfMemoryError,  # what engines catch, a RuntimeError
    "TypeError": TypeError,
    "ValueError": ValueError,
}
_PACKAGE = __name__.partition(".")[0] + "."
_INNER = (_PACKAGE + "_ops.", _PACKAGE + "cli.")


def called(op: str) -> str:
    """Return the name of the public function that the user called, ``op`` where there is none.

    Several functions share an operator, and one calls another. The name is looked up where an error is raised, in the
    outermost frame of the package, so that calls that succeed pay nothing for it.
    """
    if is_dynamo_compiling():
        return op
    frame, inside, name = sys._getframe(1), False, op
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if not module.startswith(_PACKAGE):
            if inside and not module.startswith("torch."):  # by which the package calls itself
                break
        elif not module.startswith(_INNER):
            inside = True
            if "self" in frame.f_locals and not function.startswith("_") | function.endswith("_"):
                name = f"{type(frame.f_locals['self']).__name__}.{function}"
            elif not function.startswith(("_", "<")):
                name = function
        frame = frame.f_back  # type: ignore[assignment]
    return name


def raise_as_callers_mistake(
    err: RuntimeError, op: str = "", names: Sequence[str] = (), args: Sequence[Any] = ()
) -> NoReturn:
    """Raise an operator's refusal as an exception of Python that names the function called.

    Bindings write the exception's name in front of a caller's mistake; torch's parser has a form of its own. ``names``
    are the operator's arguments, ``op`` the function where the caller of this one knows it.
    """
    text = str(err)
    kind, _, message = text.partition(": ")
    if kind in _KINDS:
        message = message.split("\nException raised from")[0]
        first, _, rest = message.partition(": ")
        if first in names or not re.fullmatch(r"\w+", first) or rest.startswith("got None"):
            rest = message  # it names an argument and no function
        argument = rest.partition(": ")[0]
        if argument in names and isinstance(given := args[names.index(argument)], torch.Tensor):
            rest = rest.replace("got another dtype", f"got {given.dtype}".replace("torch.", ""))
        raise _KINDS[kind](f"{op or called(first)}: {rest}") from None
    wrong_type = re.match(
        r"\w+::(\w+)\(\) Expected a value of type '([^']*)' for argument '(\w+)' but instead found type '([^']*)'",
        text,
    )
    if wrong_type is not None:
        inner, wanted, argument, got = wrong_type.groups()
        raise TypeError(f"{op or called(inner)}: {argument}: got {got}, wanted {wanted}") from None
    raise err


def raise_from_module(op: str, names: Sequence[str], args: Sequence[Any], err: RuntimeError) -> NoReturn:
    """Raise the refusal of a configuration's module, which does not look at the kinds of tensors as ``define`` does.

    Raises:
        ValueError: a tensor that is not dense, or tensors on several devices.
    """
    for name, tensor in zip(names, args, strict=False):
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise ValueError(f"{op}: {name}: got a tensor of {tensor.layout}, wanted a dense one") from None
    check_one_device(op, names, args)
    raise_as_callers_mistake(err, called(op), names, args)


def renamed(err: ValueError | TypeError, arguments: Mapping[str, str]) -> ValueError | TypeError:
    """Return an error of an inner function with the caller's names of its ``arguments``."""
    function, _, rest = str(err).partition(": ")
    name, _, text = rest.partition(": ")
    text = re.sub(r" as (\w+) (is|has)$", lambda like: f" as {arguments.get(like[1], like[1])} {like[2]}", text)
    return type(err)(f"{function}: {arguments.get(name, name)}: {text}") if text else err


def check_one_device(op: str, names: Sequence[str], args: Sequence[Any], on_host: frozenset[int] = frozenset()) -> None:
    """Check that all tensors are on one device, except tables on the host at the positions ``on_host``.

    Raises:
        ValueError: an argument on another device than the first.
    """
    first: tuple[str, torch.device] | None = None
    for position, (name, arg) in enumerate(zip(names, args, strict=False)):
        if not isinstance(arg, torch.Tensor) or position in on_host:
            continue
        if first is None:
            first = name, arg.device
        elif arg.device != first[1]:
            raise device_error(called(op), name, arg.device, *first)


def device_error(op: str, name: str, got: torch.device, like: str, wanted: torch.device) -> ValueError:
    """Return the error for an argument on another device than the argument ``like``."""
    return ValueError(f"{op}: {name}: got a tensor on {got}, wanted one on {wanted} as {like} is")


def on_one_device(
    op: str, names: Sequence[str], fake: Callable[..., Any], on_host: frozenset[int] = frozenset()
) -> Callable[..., Any]:
    """Return ``fake`` with a check that all tensors are on one device.

    One tensor on meta is enough for torch to call a fake implementation, and what that returns has no data.
    """

    @wraps(fake)
    def checked(*args: Any) -> Any:
        check_one_device(op, names, args, on_host)
        return fake(*args)

    return checked


def check_dense(op: str, names: Sequence[str], args: Sequence[Any]) -> None:
    """Check that no tensor is sparse, quantized or the like: no module has a kernel for those.

    Raises:
        ValueError: one is.
    """
    for name, arg in zip(names, args, strict=True):
        if not isinstance(arg, torch.Tensor) or arg.device.type not in BACKENDS:
            continue  # another check refuses devices without kernels
        if not torch._C._dispatch_keys(arg).has(getattr(torch._C.DispatchKey, arg.device.type.upper())):
            raise ValueError(f"{called(op)}: {name}: got a tensor of {arg.layout} and {arg.dtype}, wanted a dense one")


def on_copies(operator: Any) -> Callable[..., Any]:
    """Return the kernel of an operator that writes its arguments for views with the negative bit.

    Such a view stands for the negated elements of its memory. torch's fallback fails for those that are written, after
    other arguments were. This kernel calls the operator on copies, and copies back what was written.
    """
    written = [n for n, one in enumerate(operator._schema.arguments) if one.alias_info and one.alias_info.is_write]

    def call(*args: Any) -> Any:
        plain = [arg.resolve_neg() if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = operator(*plain)
        for n in written:
            if n < len(args) and args[n] is not None and args[n].is_neg():
                args[n].copy_(plain[n])
        return result

    return call
