"""Checks of a function's tensors against one schema: `b, m, k, n = bind("bmm_fp8", A=(A, "b m k", FP8), ...)`.

Every text of these errors is written here: the function that was called, the argument, got, wanted.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from .errors import called, device_error
from .sizes import differs

Dtypes = tuple[torch.dtype, ...] | str
# One dimension: a letter ("" for a fixed size), and the number that is added to it.
Pattern = tuple[tuple[str, int], ...]

_patterns: dict[str, Pattern] = {}


def bind(op: str, /, **arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Check tensors against each other, and return their sizes in the order in which the letters appear.

    Args:
        op: the function, for calls that no public function of the package makes.
        arguments: name -> ``(tensor, dimensions)`` or ``(tensor, dimensions, dtypes)``. Dimensions are words: a letter,
            which stands for one size wherever it appears, a number, a letter plus a number as in ``e+1``, or ``_`` for
            any size. A ``?`` in front allows ``None``. Dtypes are a tuple, or the name of an argument with the same.

    All tensors are dense and on the device of the first. Sizes that a graph does not know are compared when it runs.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: a tensor that is not dense, another number of dimensions, another size or another device.
    """
    sizes: dict[str, int] = {}
    first: tuple[str, torch.Tensor] | None = None
    for name, (x, text, *dtypes) in arguments.items():
        if x is None and text[0] == "?":
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{called(op)}: {name}: got {type(x).__name__}, wanted Tensor")
        if x.layout != torch.strided:
            raise ValueError(f"{called(op)}: {name}: got a tensor of {x.layout} and {x.dtype}, wanted a dense one")
        # A graph would hold a guard on the dictionary, which another call of `bind` changes.
        pattern = _parsed(text) if is_dynamo_compiling() else _patterns.get(text) or _parsed(text)
        shape = x.shape
        if len(shape) != len(pattern):
            raise ValueError(f"{called(op)}: {name}: got {len(shape)} dimensions, wanted {len(pattern)}")
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


def _check_dtype(op: str, name: str, x: torch.Tensor, wanted: Dtypes, arguments: dict[str, tuple[Any, ...]]) -> None:
    if isinstance(wanted, str):
        like: torch.dtype = arguments[wanted][0].dtype
        if x.dtype != like:
            raise TypeError(f"{called(op)}: {name}: got {x.dtype}, wanted {like} as {wanted} has")
    elif x.dtype not in wanted:
        raise TypeError(f"{called(op)}: {name}: got {x.dtype}, wanted {' or '.join(map(str, wanted))}")


def _refuse_shape(op: str, name: str, x: torch.Tensor, pattern: Pattern, sizes: dict[str, int]) -> NoReturn:
    words = []
    for letter, more in pattern:
        known = more if letter == "" else sizes.get(letter)
        words.append("any" if known is None else f"{known + more if letter else known}")
    raise ValueError(f"{called(op)}: {name}: got shape {list(x.shape)}, wanted [{', '.join(words)}]")
