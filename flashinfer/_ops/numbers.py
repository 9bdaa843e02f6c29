"""Checks of numbers and options. Each error names the argument."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from .errors import either, type_error, value_error
from .sizes import exceeds

T = TypeVar("T")


def real(op: str, name: str, value: object) -> float:
    """Return a number of any type, or the element of a tensor with one element, as a float.

    Raises:
        TypeError: the value is neither of them.
    """
    if isinstance(value, torch.Tensor):
        check_real(op, name, value)
    if not isinstance(value, str) and (not isinstance(value, torch.Tensor) or value.numel() == 1):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise type_error(op, name, type(value).__name__, "a number")


def check_real(op: str, name: str, x: torch.Tensor) -> None:
    """Check that a tensor holds real numbers. A conversion would drop imaginary parts silently.

    Raises:
        TypeError: complex numbers or booleans.
    """
    if x.is_complex() or x.dtype == torch.bool:
        raise type_error(op, name, x.dtype, "real numbers")


def positive_real(op: str, name: str, value: object, most: float = sys.float_info.max) -> float:
    """Return a number above 0 and at most ``most``.

    Raises:
        TypeError: no number.
        ValueError: a number out of range.
    """
    number = value if type(value) is float else real(op, name, value)
    if not 0 < number <= most:
        limit = "" if most == sys.float_info.max else f" up to {most:g}"
        raise value_error(op, name, number, f"a positive number{limit}")
    return number


def finite(op: str, name: str, value: object) -> float:
    """Return a number that is neither infinite nor NaN.

    Raises:
        TypeError: no number.
        ValueError: an infinite number or NaN.
    """
    number = value if type(value) is float else real(op, name, value)
    if not abs(number) <= sys.float_info.max:  # Dynamo cannot trace math.isfinite()
        raise value_error(op, name, number, "a finite number")
    return number


def whole(op: str, name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return an integer of any kind, or the element of a tensor with one integer. Floats are never rounded.

    Raises:
        TypeError: no integer.
        ValueError: an integer below ``least`` or above ``most``.
    """
    if isinstance(value, int):  # also a graph's symbol, which stays symbolic
        number = value
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            got = value if isinstance(value, float) else type(value).__name__
            raise type_error(op, name, got, "an integer") from None
    check_range(op, name, number, least, most)
    return number


def check_range(
    op: str, name: str, got: int, least: int | None = None, most: int | None = None, unit: str = "", why: str = ""
) -> None:
    """Check that a number, or a count of ``unit``, is in a range. A size that a graph does not know yet passes.

    Raises:
        ValueError: a number below ``least`` or above ``most``.
    """
    if is_dynamo_compiling():
        wrong = (least is not None and exceeds(least, got)) or (most is not None and exceeds(got, most))
    else:
        wrong = (least is not None and got < least) or (most is not None and got > most)
    if wrong:
        if least == most:
            wanted = f"{least}"
        else:
            wanted = (
                f"at most {most}" if least is None else f"at least {least}" if most is None else f"{least} to {most}"
            )
        raise value_error(op, name, f"{got} {unit}".rstrip(), wanted + why)


def positive(op: str, name: str, value: object) -> int:
    """Return an integer above 0.

    Raises:
        TypeError: no integer.
        ValueError: an integer of 0 or less.
    """
    number = whole(op, name, value)
    if number < 1:
        raise value_error(op, name, number, "a positive number")
    return number


def check_multiple(op: str, name: str, got: int, of: str, divisor: int) -> None:
    """Check that a number is a multiple of ``divisor``, the value of the argument ``of``.

    Raises:
        ValueError: the number is not a multiple.
    """
    if divisor < 1 or got % divisor != 0:
        raise value_error(op, name, got, f"a multiple of {of}, {divisor}")


def check_option(op: str, name: str, value: object, options: Sequence[object], why: str = "") -> None:
    """Check that an argument is one of ``options``. ``why``: text after the options in the error.

    Raises:
        ValueError: a value that is not an option.
    """
    if value not in options:
        raise value_error(op, name, repr(value), either(map(repr, options)) + why)


def choice(op: str, name: str, value: str, options: Mapping[str, T]) -> T:
    """Return the value of a named option.

    Raises:
        ValueError: an unknown name.
    """
    check_option(op, name, value, tuple(options))
    return options[value]
