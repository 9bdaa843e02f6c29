"""``list``: the modules of the AOT matrix."""

from __future__ import annotations

import argparse

from ..jit.modules import Matrix, matrix_specs
from .table import show
from .usage import Add, json_option

HELP = "Every module of the AOT matrix: what it covers, and the key of its present sources."


def arguments(add: Add) -> None:
    json_option(add)


def run(options: argparse.Namespace) -> int:
    rows = [
        {
            "name": spec.name,
            "backend": spec.backend,
            "config": dict(spec.config),
            "coverage": {axis: list(values) for axis, values in spec.coverage},
            "key": spec.key,
        }
        for spec in matrix_specs(Matrix())
    ]
    show(rows, options.json, {"key": lambda key: key[:16]})
    return 0
