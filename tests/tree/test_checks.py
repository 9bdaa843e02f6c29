"""Checks of arguments: families use those of ``flashinfer/_ops``, and raise few errors of their own."""

from __future__ import annotations

import ast
from pathlib import Path

from ..support.tree import ROOT

PACKAGE = ROOT / "flashinfer"
MOST_RAISES = 40
APART = {"jit", "cli", "env.py", "_ops"}  # they check files, environments and the command line


def raises(text: str) -> list[int]:
    """Return the lines that raise a new ``ValueError`` or ``TypeError``."""
    calls = (node.exc for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise))
    return [
        call.lineno
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("ValueError", "TypeError")
    ]


def own_raises(package: Path) -> list[str]:
    """Return the places of such lines in families."""
    paths = (path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in APART)
    return [f"{path.relative_to(package)}:{line}" for path in paths for line in raises(path.read_text())]


def test_families_use_the_shared_checks():
    found = own_raises(PACKAGE)
    assert len(found) <= MOST_RAISES, "use check_tensors() or another check of flashinfer/_ops:\n" + "\n".join(found)


def test_raises_are_found(tmp_path):
    lines = [
        "try:",
        "    raise ValueError('a')",
        "except ValueError as err:",
        "    raise TypeError(f'{err}') from None",
        "raise",
    ]
    for name in ("norm.py", "_ops/shapes.py", "env.py", "comm/all.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(lines))
    assert own_raises(tmp_path) == ["comm/all.py:2", "comm/all.py:4", "norm.py:2", "norm.py:4"]
