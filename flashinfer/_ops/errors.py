"""Errors that name the called function, the argument, the value it got and the value it wanted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import GroupError
from ..jit.spec import BACKENDS

Result = TypeVar("Result")

_KINDS: dict[str, type[Exception]] = {
    "GroupError": GroupError,
    "IndexError": IndexError,
    "OutOfMemoryError": torch.OutOfMemoryError,  # a RuntimeError that engines catch
    "TypeError": TypeError,
    "ValueError": ValueError,
}
_PACKAGE = __name__.partition(".")[0] + "."
_INNER = (_PACKAGE + "_ops.", _PACKAGE + "cli.")


def called(op: str) -> str:
    """Return the name of the public function that the user called, or ``op`` if there is none.

    Public functions share operators and call each other, so the outermost frame of the package is the user's call. The
    stack is read only after an error, so successful calls cost nothing more.
    """
    if is_dynamo_compiling():
        return op
    frame, inside, name = sys._getframe(1), False, op
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if not module.startswith(_PACKAGE):
            if inside and not module.startswith("torch."):  # the package calls itself through torch
                break
        elif not module.startswith(_INNER):
            inside = True
            if "self" in frame.f_locals and function == "__init__":
                name = type(frame.f_locals["self"]).__name__
            elif "self" in frame.f_locals and not function.startswith("_") | function.endswith("_"):
                name = f"{type(frame.f_locals['self']).__name__}.{function}"
            elif not function.startswith(("_", "<")):
                name = function
        frame = frame.f_back  # type: ignore[assignment]
    return name


def raise_as_callers_mistake(
    err: RuntimeError, op: str = "", names: Sequence[str] = (), args: Sequence[Any] = ()
) -> NoReturn:
    """Raise an operator's error as a Python exception that names the called function.

    The error text of a binding begins with the Python exception to raise, such as ``ValueError: ``. torch's parser has
    its own form.

    Args:
        err: the error of the operator.
        op: the called function, or "" to find it on the stack.
        names: the operator's arguments.
        args: their values.
    """
    text = str(err)
    kind, _, message = text.partition(": ")
    if kind in _KINDS:
        message = message.split("\nException raised from")[0]
        first, _, rest = message.partition(": ")
        if first in names or not re.fullmatch(r"\w+", first) or rest.startswith("got None"):
            rest = message  # it names an argument, not a function
        argument = rest.partition(": ")[0]
        if argument in names and isinstance(tensor := args[names.index(argument)], torch.Tensor):
            rest = rest.replace("got another dtype", f"got {tensor.dtype}".replace("torch.", ""))
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
    """Raise the error of an operator with one module per configuration.

    These operators are not declared by ``define``, which would check layouts and devices. So this function does.

    Raises:
        ValueError: a tensor that is not dense, or tensors on several devices.
    """
    for name, tensor in zip(names, args, strict=False):
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise value_error(op, name, f"a tensor of {tensor.layout}", "a dense one") from None
    check_one_device(op, names, args)
    raise_as_callers_mistake(err, called(op), names, args)


def renamed(err: ValueError | TypeError, arguments: Mapping[str, str]) -> ValueError | TypeError:
    """Return a copy of an inner function's error that uses the caller's argument names."""
    function, _, rest = str(err).partition(": ")
    name, _, text = rest.partition(": ")
    text = re.sub(
        r"(?<= as )\w+(?= (is|has)$)|(?<=memory of )\w+$", lambda other: arguments.get(other[0], other[0]), text
    )
    name, bracket, position = name.partition("[")  # an item of an argument
    name = f"{arguments.get(name, name)}{bracket}{position}"
    return type(err)(f"{function}: {name}: {text}") if text and type(err) in (ValueError, TypeError) else err


def call_as(arguments: Mapping[str, str], function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call an inner function whose errors use the caller's argument names.

    Args:
        arguments: an argument of the inner function -> its name in the caller's signature.
    """
    try:
        return function(*args, **options)
    except (ValueError, TypeError) as err:
        raise renamed(err, arguments) from None


def check_one_device(op: str, names: Sequence[str], args: Sequence[Any], on_host: frozenset[int] = frozenset()) -> None:
    """Check that all tensors are on one device, except host tables at the positions ``on_host``.

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


def value_error(op: str, name: str, got: object, wanted: object) -> ValueError:
    """Return the error for an argument with an invalid value."""
    return ValueError(f"{called(op)}: {name}: got {got}, wanted {wanted}")


def type_error(op: str, name: str, got: object, wanted: object) -> TypeError:
    """Return the error for an argument with an invalid type or dtype."""
    return TypeError(f"{called(op)}: {name}: got {got}, wanted {wanted}")


def device_error(op: str, name: str, got: torch.device, like: str, wanted: torch.device) -> ValueError:
    """Return the error for an argument on another device than the argument ``like``."""
    return ValueError(f"{op}: {name}: got a tensor on {got}, wanted one on {wanted} as {like} is")


def either(choices: Iterable[object]) -> str:
    """Return the text ``a, b or c``."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def on_one_device(
    op: str, names: Sequence[str], fake: Callable[..., Any], on_host: frozenset[int] = frozenset()
) -> Callable[..., Any]:
    """Return ``fake`` with a check that all tensors are on one device.

    torch calls the fake implementation if any tensor is on meta, even if others are not. Such a result would have no data.
    """

    @wraps(fake)
    def checked(*args: Any) -> Any:
        check_one_device(op, names, args, on_host)
        return fake(*args)

    return checked


def check_dense(op: str, names: Sequence[str], args: Sequence[Any]) -> None:
    """Check that no tensor is sparse or quantized, because no module has kernels for these.

    Raises:
        ValueError: a tensor that is not dense.
    """
    for name, arg in zip(names, args, strict=True):
        if not isinstance(arg, torch.Tensor) or arg.device.type not in BACKENDS:
            continue  # another check refuses devices without kernels
        if not torch._C._dispatch_keys(arg).has(getattr(torch._C.DispatchKey, arg.device.type.upper())):
            raise value_error(op, name, f"a tensor of {arg.layout} and {arg.dtype}", "a dense one")


def on_copies(operator: Any) -> Callable[..., Any]:
    """Return a kernel that lets an operator write views with torch's negative bit.

    The values of such a view are the negated values in memory. torch's own fallback does not support views that an
    operator writes: it raises an error after other arguments were written. This kernel calls the operator on copies and
    copies the results back.
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
