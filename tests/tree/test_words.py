"""Words: docstrings and comments begin with a verb or a noun, not with a relative clause."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from ..support.tree import ROOT

CLAUSE = re.compile(r"(What|Of|Where|Whether|Who|Whose|Which|How)\b")
PYTHON = ("flashinfer", "scripts", "benchmarks", "examples", "tests")
NATIVE = ("include", "csrc", "tests")


def docstrings(text: str) -> list[tuple[int, str]]:
    """Return the line and the text of every docstring of a file."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, nodes) and ast.get_docstring(node)]
    return [(node.body[0].lineno, ast.get_docstring(node) or "") for node in found]


def python_comments(text: str) -> list[tuple[int, str]]:
    """Return the first line of every comment of a Python file: of a block, or after code."""
    found, above = list[tuple[int, str]](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, is_whole = token.start[0], token.line.lstrip().startswith("#")
        if not (is_whole and above == line - 1):
            found.append((line, token.string.lstrip("#!: ")))
        above = line if is_whole else 0
    return found


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
    openings = docstrings(text) + python_comments(text) if path.suffix == ".py" else comments(text)
    return [f"{path.relative_to(ROOT)}:{line}: {words[:60]}" for line, words in openings if CLAUSE.match(words)]


@pytest.mark.parametrize("folder", PYTHON)
def test_docstrings_and_comments_of_python(folder):
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
    python.write_text(
        '"""What it is."""\n\ndef f():\n    """Whether it is."""\n\ndef g():\n    """Return it."""\n'
        "# Of a row.\n# Of which this goes on.\na = '# Who'  # Where it is.\n# A row.\n"
    )
    native.write_text("// Of a row.\n// Of which this goes on.\nint a;  // Where it is.\nint b;\n// A row.\n")
    assert [text.split(": ")[0] for text in clauses(python)] == ["a.py:1", "a.py:4", "a.py:8", "a.py:10"]
    assert [text.split(": ")[0] for text in clauses(native)] == ["a.h:1", "a.h:3"]
