"""Checks of a function's tensors against one schema: `m, k, n = check_tensors("mm", a=(a, "m k"), b=(b, "k n"))`.

An error names the called function, the argument, the value it got and the value it wanted.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called, device_error, type_error, value_error
from .sizes import differs
from .tensors import check_dtype, check_tensor

_Tensor, _strided = torch.Tensor, torch.strided
# (name, number) of each dimension: its size is ``sizes[name] + number``. A fixed size has the name "", and
# ``sizes[""]`` is 0.
Pattern = tuple[tuple[str, int], ...]

_patterns: dict[str, Pattern] = {}


def check_tensors(op: str, /, **arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Check tensors against each other. Return their sizes in the order in which the names appear.

    Args:
        op: the function to name in errors, unless a public function of the package is on the stack.
        arguments: name -> ``(tensor, dimensions)`` or ``(tensor, dimensions, dtypes)``.

            Dimensions are a text with one word for each dimension: a name, a number, a name plus a number such as
            ``e+1``, or ``_`` for any size. Dimensions with the same name must have the same size. A ``?`` before the
            words allows ``None`` for the tensor. Dimensions may also be a tuple of sizes, or ``None`` for any shape.

            Dtypes are a tuple, or the name of another argument with the same dtype.

    All tensors are dense and on the device of the first. A graph that does not know sizes yet compares them at
    run time.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: a tensor is not dense, or has another number of dimensions, another size or another device.
    """
    compiling = is_dynamo_compiling()
    sizes: dict[str, int] = {"": 0}
    like, device = "", None
    for name, argument in arguments.items():
        x, dims = argument[0], argument[1]
        if x is None and dims and dims[0] == "?":
            continue
        if not isinstance(x, _Tensor) or x.layout is not _strided:
            check_tensor(op, name, x)
        shape = x.shape
        if dims is not None and (compiling or shape != dims):
            if not isinstance(dims, str):
                pattern = _fixed(dims)
            else:
                # A graph must not read _patterns: its guard would fail when another call adds a pattern.
                pattern = _parsed(dims) if compiling else _patterns.get(dims) or _parsed(dims)
            if len(shape) != len(pattern):
                raise value_error(op, name, f"{len(shape)} dimensions", len(pattern))
            if compiling:
                _check_in_graph(op, name, x, pattern, sizes)
            else:
                for size, (dimension, offset) in zip(shape, pattern):  # noqa: B905 - a quarter of the loop's time
                    if dimension != "_" and sizes.setdefault(dimension, size - offset) != size - offset:
                        _refuse_shape(op, name, x, pattern, sizes)
        if len(argument) > 2:
            dtypes = argument[2]
            if isinstance(dtypes, str):
                if x.dtype != (same := arguments[dtypes][0].dtype):
                    raise type_error(op, name, x.dtype, f"{same} as {dtypes} has")
            elif x.dtype not in dtypes:
                check_dtype(op, name, x.dtype, dtypes)
        if device is None:
            like, device = name, x.device
        elif x.device != device:
            raise device_error(called(op), name, x.device, like, device)
    del sizes[""]
    return tuple(sizes.values())


def _check_in_graph(op: str, name: str, x: torch.Tensor, pattern: Pattern, sizes: dict[str, int]) -> None:
    for size, (dimension, offset) in zip(x.shape, pattern, strict=True):
        if dimension in sizes:
            if differs(size, sizes[dimension] + offset):
                _refuse_shape(op, name, x, pattern, sizes)
            torch._check(size == sizes[dimension] + offset)
        elif dimension != "_":
            sizes[dimension] = size - offset


def _parsed(text: str) -> Pattern:
    pattern = []
    for word in text.removeprefix("?").split():
        dimension, _, offset = word.partition("+")
        pattern.append(("", int(dimension)) if dimension.isdigit() else (dimension, int(offset or 0)))
    found = tuple(pattern)
    if not is_dynamo_compiling():
        _patterns[text] = found
    return found


def _fixed(dims: tuple[Any, ...]) -> Pattern:
    optional = dims and isinstance(dims[0], str)
    return tuple([("", size) for size in (dims[1:] if optional else dims)])


def _refuse_shape(op: str, name: str, x: torch.Tensor, pattern: Pattern, sizes: dict[str, int]) -> NoReturn:
    words = []
    for dimension, offset in pattern:
        known = sizes.get(dimension)
        words.append("any" if known is None else f"{known + offset}")
    # Format the text here: a graph would put quotation marks around a text that value_error() inserts.
    raise ValueError(f"{called(op)}: {name}: got shape {list(x.shape)}, wanted [{', '.join(words)}]")
