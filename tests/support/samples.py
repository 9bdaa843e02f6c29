"""Sample calls with random inputs of every operator and every public function, for general tests.

They come from ``CASES`` of ``tests/<folder>/cases.py``, or of ``tests/<folder>/test_<family>.py`` if the
folder has no such file. A missing one fails ``tests/torch/test_ops.py`` and ``tests/torch/test_compile.py``.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from flashinfer.jit.modules import families

from .cases import Case, Cases

TESTS = Path(__file__).resolve().parents[1]


def operator_calls(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return operator -> arguments, once or more. Tensors of differentiable operators require gradients."""
    return {name: calls for one in found() for name, calls in one.operators(device).items()}


def public_cases(device: str) -> dict[str, Case]:
    """Return public function -> a call of it."""
    return {name: case for one in found() for name, case in one.functions(device).items()}


def attention_cases(device: str) -> dict[str, Case]:
    """Return calls of attention's functions and wrappers that are used in training, and related ones."""
    return {name: case for one in found() for name, case in one.trained(device).items()}


@cache
def found() -> tuple[Cases, ...]:
    """Return the cases of all families, in the order of their folders."""
    files = {*TESTS.glob("*/cases.py")}
    tests = (path for name in families() for path in TESTS.glob(f"*/test_{name}.py"))
    files |= {path for path in tests if path.parent / "cases.py" not in files and "\nCASES = " in path.read_text()}
    package = __name__.rpartition(".support.")[0]
    names = (f"{package}.{path.parent.name}.{path.stem}" for path in sorted(files) if path.parent.name != "support")
    return tuple(importlib.import_module(name).CASES for name in names)
