"""Checks of numbers and options. Each error names the argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from .errors import either, type_error, value_error


def real(op: str, name: str, given: object) -> float:
    """Return a number of any kind, or the element of a tensor with one element, as a float.

    Raises:
        TypeError: neither of them.
    """
    if isinstance(given, torch.Tensor):
        check_real(op, name, given)
    if not isinstance(given, str) and (not isinstance(given, torch.Tensor) or given.numel() == 1):
        try:
            return float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise type_error(op, name, type(given).__name__, "a number")


def check_real(op: str, name: str, x: torch.Tensor) -> None:
    """Check that a tensor holds real numbers. A conversion would drop imaginary parts silently.

    Raises:
        TypeError: complex numbers or booleans.
    """
    if x.is_complex() or x.dtype == torch.bool:
        raise type_error(op, name, x.dtype, "real numbers")


def whole(op: str, name: str, given: object) -> int:
    """Return an integer of any kind, or the element of a tensor with one integer. Floats are never rounded.

    Raises:
        TypeError: no integer.
    """
    if isinstance(given, int):  # also a graph's symbol, which stays symbolic
        return given
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        got = given if isinstance(given, float) else type(given).__name__
        raise type_error(op, name, got, "an integer") from None


def positive(op: str, name: str, given: object) -> int:
    """Return an integer above 0.

    Raises:
        TypeError: no integer.
        ValueError: an integer of 0 or less.
    """
    number = whole(op, name, given)
    if number < 1:
        raise value_error(op, name, number, "a positive number")
    return number


def check_option(op: str, name: str, given: object, options: Sequence[object]) -> None:
    """Check that an argument is one of a few values.

    Raises:
        ValueError: another value.
    """
    if given not in options:
        raise value_error(op, name, repr(given), either(map(repr, options)))
