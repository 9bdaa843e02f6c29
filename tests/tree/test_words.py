"""Words: docstrings and comments of C++ begin with a verb or a noun, not with a relative clause."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ..support.tree import ROOT

CLAUSE = re.compile(r"(What|Of|Where|Whether|Who|Whose|Which|How)\b")
PYTHON = ("flashinfer", "scripts", "benchmarks", "examples")
NATIVE = ("include", "csrc")


def docstrings(text: str) -> list[tuple[int, str]]:
    """Return the line and the text of every docstring of a file."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, nodes) and ast.get_docstring(node)]
    return [(node.body[0].lineno, ast.get_docstring(node) or "") for node in found]


def comments(text: str) -> list[tuple[int, str]]:
    """Return the first line of every comment of a C++ file: of a block, or after code."""
    found, above = list[tuple[int, str]](), False
    for number, line in enumerate(text.splitlines(), 1):
        code, mark, comment = line.partition("//")
        is_whole = bool(mark) and not code.strip()
        if mark and not (is_whole and above):
            found.append((number, comment.lstrip("/!<").strip()))
        above = is_whole
    return found


def clauses(path: Path) -> list[str]:
    """Return the openings of a file that are relative clauses."""
    text = path.read_text()
    openings = docstrings(text) if path.suffix == ".py" else comments(text)
    return [f"{path.relative_to(ROOT)}:{line}: {words[:60]}" for line, words in openings if CLAUSE.match(words)]


@pytest.mark.parametrize("folder", PYTHON)
def test_docstrings(folder):
    found = [text for path in sorted((ROOT / folder).rglob("*.py")) for text in clauses(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", NATIVE)
def test_comments_of_native_code(folder):
    files = (
        path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".h", ".cuh", ".cc", ".cu", ".jinja")
    )
    found = [text for path in files for text in clauses(path)]
    assert not found, "\n".join(found)


def test_clauses_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    python, native = tmp_path / "a.py", tmp_path / "a.h"
    python.write_text('"""What it is."""\n\ndef f():\n    """Whether it is."""\n\ndef g():\n    """Return it."""\n')
    native.write_text("// Of a row.\n// Of which this goes on.\nint a;  // Where it is.\nint b;\n// A row.\n")
    assert [text.split(": ")[0] for text in clauses(python)] == ["a.py:1", "a.py:4"]
    assert [text.split(": ")[0] for text in clauses(native)] == ["a.h:1", "a.h:3"]
