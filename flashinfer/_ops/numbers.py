"""Numbers that callers give: what is none, or none of the kind wanted, is an error that names the argument."""

from __future__ import annotations

import operator

import torch

from .errors import called


def real(op: str, name: str, given: object) -> float:
    """A number of any kind, or a tensor of one element.

    Raises:
        TypeError: neither.
    """
    if isinstance(given, torch.Tensor):
        check_real(op, name, given)
    if not isinstance(given, str) and (not isinstance(given, torch.Tensor) or given.numel() == 1):
        try:
            return float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{op}: {name}: got {type(given).__name__}, wanted a number")


def check_real(op: str, name: str, x: torch.Tensor) -> None:
    """Check that a tensor holds real numbers: a conversion would drop imaginary parts in silence.

    Raises:
        TypeError: complex numbers or booleans.
    """
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{called(op)}: {name}: got {x.dtype}, wanted real numbers")


def whole(op: str, name: str, given: object) -> int:
    """An integer of any kind, or a tensor of one.

    Raises:
        TypeError: neither; a float is never rounded.
    """
    if isinstance(given, int):  # a graph's symbol is one too, and stays symbolic
        return given
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        got = given if isinstance(given, float) else type(given).__name__
        raise TypeError(f"{op}: {name}: got {got}, wanted an integer") from None


def positive(op: str, name: str, given: object) -> int:
    """An integer above 0.

    Raises:
        TypeError: no integer.
        ValueError: one of 0 or less.
    """
    number = whole(op, name, given)
    if number < 1:
        raise ValueError(f"{op}: {name}: got {number}, wanted a positive number")
    return number
