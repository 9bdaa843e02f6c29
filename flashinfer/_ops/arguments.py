"""Checks of optional arguments, of combinations of arguments, and of a run's arguments against its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called, type_error, value_error
from .sizes import differs

T = TypeVar("T")


def check_none(op: str, name: str, value: object, why: str) -> None:
    """Check that an argument is ``None``.

    Raises:
        ValueError: the argument is not ``None``. The text ends with ``why``.
    """
    if value is not None:
        raise value_error(op, name, type(value).__name__, f"None: {why}")


def check_present(op: str, name: str, value: T | None, wanted: str) -> T:
    """Return an argument that must not be ``None``.

    Raises:
        ValueError: the argument is ``None``. The text ends with ``wanted``.
    """
    if value is None:
        raise value_error(op, name, None, wanted)
    return value


def check_not_both(op: str, first: str, value: object, second: str, other: object) -> None:
    """Check that at most one of two arguments is given.

    Raises:
        ValueError: both are given.
    """
    if value is not None and other is not None:
        raise value_error(op, first, "both", f"only {first} or only {second}")


def all_or_none(op: str, **values: object) -> bool:
    """Return true if all arguments are given, false if all are ``None``.

    Raises:
        ValueError: some are ``None``.
    """
    missing = [name for name, value in values.items() if value is None]
    if missing and len(missing) < len(values):
        raise value_error(op, missing[0], None, f"all or none of {', '.join(values)}")
    return not missing


def check_no_extra(op: str, args: Sequence[object], why: str = "") -> None:
    """Check that a call has no further positional arguments.

    Raises:
        TypeError: there are further arguments.
    """
    if args:
        raise TypeError(f"{called(op)}: got {len(args)} more arguments, wanted none{why}")


def check_items(op: str, name: str, value: object, what: str, count: int | None = None) -> None:
    """Check that an argument is a list or a tuple of ``count`` items, which ``what`` describes.

    Raises:
        TypeError: another type.
        ValueError: another number of items.
    """
    if not isinstance(value, (tuple, list)):
        raise type_error(op, name, type(value).__name__, f"a list or tuple of {what}")
    if count is not None and len(value) != count:
        raise value_error(op, name, len(value), f"{count}, {what}")


def check_equal(op: str, name: str, numbers: Sequence[int], unit: str) -> None:
    """Check that numbers are equal. ``unit`` follows them in the error.

    Raises:
        ValueError: two numbers differ.
    """
    if len(set(numbers)) > 1:
        raise value_error(op, name, f"{[*numbers]} {unit}", "equal numbers")


def check_planned(op: str, plan: T | None, call: str = "plan()") -> T:
    """Return the plan of a run.

    Raises:
        ValueError: plan() was not called.
    """
    if plan is None:
        raise ValueError(f"{called(op)}: got no plan, wanted a call of {call} before")
    return plan


def check_as_planned(op: str, name: str, got: Any, planned: Any, unit: str = "") -> None:
    """Check that a size, a dtype or an option of a run equals that of its plan. ``unit`` follows it in the error.

    Raises:
        TypeError: another dtype.
        ValueError: another size or option.
    """
    if differs(got, planned) if is_dynamo_compiling() else got != planned:
        error = TypeError if isinstance(planned, torch.dtype) else ValueError
        raise error(f"{called(op)}: {name}: got {f'{got} {unit}'.rstrip()}, and plan() was called for {planned}")
