"""Types of command arguments, and the error for an invalid one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import env
from ..jit.module import JitSpec
from ..jit.modules import Matrix, matrix_specs
from ..jit.specfile import RecordedSpec, one_per_name, read_specs

Add = Callable[..., object]  # of an argparse parser


class UsageError(Exception):
    """The command names something that does not exist or cannot be used."""


def recorded_specs(path: Path, folder: Path) -> list[RecordedSpec]:
    """Return the modules of a ``--specs`` file.

    Raises:
        UsageError: it is not a file of specs.
    """
    try:
        return read_specs(path, folder)
    except ValueError as err:
        raise UsageError(f"--specs: {err}") from None


def unique_by_name(recorded: list[RecordedSpec]) -> list[RecordedSpec]:
    """Return the modules of a ``--specs`` file for one directory, which holds one module of each name.

    Raises:
        UsageError: two different modules have one name.
    """
    try:
        return one_per_name(recorded)
    except ValueError as err:
        raise UsageError(f"--specs: {err}") from None


def of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse that reports the ``ValueError`` of ``parse``."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return convert


cuda_archs, size_limit = of(env.parse_cuda_archs), of(env.parse_size)


def positive(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a positive number")
    return int(text)


def seconds(text: str) -> float:
    """Return a time of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted seconds")
    return value


def shard(text: str) -> tuple[int, int]:
    """Return the first index and the count of ``I/N``, with I from 1 to N."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted I/N with I from 1 to N")
    return int(first), int(count)


def json_option(add: Add) -> None:
    """Declare ``--json``."""
    add("--json", action="store_true", help="print JSON")


def named(names: Sequence[str]) -> list[JitSpec]:
    """Return the specs of modules of the matrix.

    Raises:
        UsageError: there is no such module.
    """
    specs = {spec.name: spec for spec in matrix_specs(Matrix())}
    for name in names:
        if name not in specs:
            close = difflib.get_close_matches(name, specs, n=4, cutoff=0.4)
            hint = f"did you mean {' or '.join(close)}?" if close else f"wanted one of {', '.join(specs)}"
            raise UsageError(f"there is no module {name!r}: {hint} (`flashinfer list` names all)")
    return [specs[name] for name in dict.fromkeys(names)]
