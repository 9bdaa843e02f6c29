"""What an argument of a command may be: its types, and the error of one that cannot be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import env
from ..jit.specfile import Asked, read_specs


class UsageError(Exception):
    """The command names something that does not exist or cannot be used."""


def asked_in(path: Path, folder: Path) -> list[Asked]:
    """What ``--specs`` asks for.

    Raises:
        UsageError: it is no file of specs.
    """
    try:
        return read_specs(path, folder)
    except ValueError as err:
        raise UsageError(f"--specs: {err}") from None


def of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of argparse that says what a ``ValueError`` of ``parse`` says."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return convert


cuda_archs, size_limit = of(env.parse_cuda_archs), of(env.parse_size)
