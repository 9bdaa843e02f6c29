"""Checks of a function's tensors against one schema: `m, k, n = bind("mm", a=(a, "m k"), b=(b, "k n"))`.

An error names the called function, the argument, the value it got and the value it wanted.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called, device_error, type_error, value_error
from .sizes import differs
from .tensors import check_dtype, check_tensor

Dtypes = tuple[torch.dtype, ...] | str
# One dimension: a letter ("" for a fixed size), and the number that is added to it.
Pattern = tuple[tuple[str, int], ...]

_patterns: dict[str, Pattern] = {}


def bind(op: str, /, **arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Check tensors against each other. Return their sizes in the order in which the letters appear.

    Args:
        op: the function, for calls that no public function of the package makes.
        arguments: name -> ``(tensor, dimensions)`` or ``(tensor, dimensions, dtypes)``. Dimensions are words:
            a letter for one size wherever it appears, a number, a letter plus a number as in ``e+1``, or
            ``_`` for any size. They can also be a tuple of computed sizes, or ``None`` for any shape. A ``?``
            in front allows ``None``. Dtypes are a tuple, or the name of an argument with the same dtype.

    All tensors are dense and on the device of the first. A graph compares sizes that are still unknown when
    it runs.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: a tensor that is not dense, another number of dimensions, another size or another device.
    """
    sizes: dict[str, int] = {}
    first: tuple[str, torch.Tensor] | None = None
    for name, (x, dims, *dtypes) in arguments.items():
        if x is None and dims and isinstance(dims[0], str) and dims[0] == "?":
            continue
        check_tensor(op, name, x)
        shape = x.shape
        if not isinstance(dims, str):
            pattern = (("_", 0),) * len(shape) if dims is None else _fixed(dims)
        else:
            # A graph would hold a guard on the dictionary, which another call of `bind` changes.
            pattern = _parsed(dims) if is_dynamo_compiling() else _patterns.get(dims) or _parsed(dims)
        if len(shape) != len(pattern):
            raise value_error(op, name, f"{len(shape)} dimensions", len(pattern))
        for size, (letter, more) in zip(shape, pattern, strict=True):
            if letter == "_":
                continue
            wanted = more if letter == "" else sizes.get(letter)
            if wanted is None:
                sizes[letter] = size - more
            elif differs(size, wanted + more if letter else wanted):
                _refuse_shape(op, name, x, pattern, sizes)
            elif is_dynamo_compiling():
                torch._check(size == (wanted + more if letter else wanted))
        if dtypes:
            _check_dtype(op, name, x, dtypes[0], arguments)
        if first is None:
            first = name, x
        elif x.device != first[1].device:
            raise device_error(called(op), name, x.device, first[0], first[1].device)
    return tuple(sizes.values())


def _parsed(text: str) -> Pattern:
    pattern = []
    for word in text.removeprefix("?").split():
        letter, _, more = word.partition("+")
        pattern.append(("", int(letter)) if letter.isdigit() else (letter, int(more or 0)))
    found = tuple(pattern)
    if not is_dynamo_compiling():
        _patterns[text] = found
    return found


def _fixed(dims: tuple[Any, ...]) -> Pattern:
    optional = dims and isinstance(dims[0], str)
    return tuple([("", size) for size in (dims[1:] if optional else dims)])


def _check_dtype(op: str, name: str, x: torch.Tensor, wanted: Dtypes, arguments: dict[str, tuple[Any, ...]]) -> None:
    if not isinstance(wanted, str):
        check_dtype(op, name, x.dtype, wanted)
    elif x.dtype != (like := arguments[wanted][0].dtype):
        raise type_error(op, name, x.dtype, f"{like} as {wanted} has")


def _refuse_shape(op: str, name: str, x: torch.Tensor, pattern: Pattern, sizes: dict[str, int]) -> NoReturn:
    words = []
    for letter, more in pattern:
        known = more if letter == "" else sizes.get(letter)
        words.append("any" if known is None else f"{known + more if letter else known}")
    # One text: in a graph, a text inside another one would be quoted.
    raise ValueError(f"{called(op)}: {name}: got shape {list(x.shape)}, wanted [{', '.join(words)}]")
