"""Layers of Python: the command line above the library, the library above the build system; no cycles."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from ..support.tree import ROOT

PACKAGE = ROOT / "flashinfer"
# Layer, by folder -> layers that it may import. A file of the package itself is in the layer "". All import
# the ground.
GROUND = {"env", "errors", "jit/events", "jit/process", "jit/report", "jit/spec"}
LAYERS = {
    "ground": set[str](),
    "jit/machine": {"ground"},
    "jit/worker": set(),
    "jit": {"ground", "jit/machine", "jit/worker", "jit/modules"},
    "jit/cluster": {"ground", "jit", "jit/machine", "jit/worker"},
    "jit/modules": {"ground", "jit", "jit/machine"},
    "_ops": {"ground", "jit"},
    "_compat": {"ground", "_ops", ""},
    "_attention": {"ground", "jit", "jit/machine", "jit/modules", "_ops", "_compat", ""},
    "": {"ground", "jit", "jit/machine", "jit/modules", "_ops", "_attention", "_compat"},
    "integrations": {"ground", "jit", "jit/modules", "", "_ops", "_attention"},
    "cli": {"ground", "jit", "jit/cluster", "jit/machine", "jit/modules", ""},
}
# Files that may know attention: its families and their shared parts.
ATTENTION = {
    "_attention",
    "_mla",
    "mla",
    "decode",
    "prefill",
    "prefill_backward",
    "attention",
    "pod",
    "sparse",
    "cascade",
    "triton",
    "xqa",
}


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """Return ``jit/spec`` for a file and ``jit`` for a package."""
    return str(path.relative_to(PACKAGE).with_suffix("")).removesuffix("__init__").rstrip("/")


def layer_of(name: str) -> str:
    if name in GROUND:
        return "ground"
    if name == "__main__":
        return "cli"
    folder = name if (PACKAGE / name).is_dir() else str(Path(name).parent)
    while folder not in LAYERS and folder not in ("", "."):
        folder = str(Path(folder).parent)
    return "" if folder in ("", ".") else folder


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the files of the package that a file imports, also in functions and for type checks."""
    return imports_of(path.read_text(), path.parent.relative_to(PACKAGE).parts) - {name_of(path)}


def imports_of(text: str, package: tuple[str, ...]) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            words = (node.module or "").split(".") if node.module else []
            if not node.level:
                if words[:1] != ["flashinfer"]:
                    continue
                words = words[1:]
            inner = "/".join([*base, *words])
            # A name imported from a package may be one of its files.
            names = [f"{inner}/{one.name}".lstrip("/") if is_there(inner, one.name) else inner for one in node.names]
        elif isinstance(node, ast.Import):
            names = ["/".join(one.name.split(".")[1:]) for one in node.names if one.name.split(".")[0] == "flashinfer"]
        found.update(names)
    return frozenset(found)


def is_there(folder: str, name: str) -> bool:
    place = PACKAGE / folder / name
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_a_file_imports_only_from_its_layer_and_those_below(path):
    layer = layer_of(name_of(path))
    for name in imported(path):
        assert layer_of(name) in LAYERS[layer] | {layer}, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_nothing_generic_imports_attention(path):
    name = name_of(path)
    if {*Path(name).parts} & ATTENTION or layer_of(name) == "integrations":
        return
    known = {one for one in imported(path) if {*Path(one).parts} & ATTENTION}
    assert not known, f"{name} imports {', '.join(sorted(known))}"


def test_imports_have_no_cycle():
    """Imports in functions and for type checkers count too."""
    graph = {name_of(path): sorted(one for one in imported(path) if one) for path in files()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in done:
            for one in graph.get(name, ()):
                visit(one, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", sorted((PACKAGE / "_compat").glob("*.py")), ids=name_of)
def test_a_public_name_of_the_shelf_is_an_address(path):
    """Modules of public names import from ``_compat`` and define nothing, so that a call has one path."""
    for address in (PACKAGE / path.name, PACKAGE / "gdn_kernels" / path.name):
        if path.stem == "__init__" or not address.is_file():
            continue
        kinds = [type(node) for node in ast.parse(address.read_text()).body]
        assert kinds == [ast.Expr, ast.ImportFrom, ast.ImportFrom, ast.Assign], address.name
        assert imported(address) == {name_of(path)}


def test_imports_anywhere_in_a_file_are_found(tmp_path):
    """Relative imports, those in functions, and those by the package's name are found."""
    lines = [
        "from __future__ import annotations",
        "import os, flashinfer.norm",
        "def late():",
        "    from ..cli.main import main",
        "    from ..jit import spec, JitSpec",
        "from .machine.target import Target",
        "from flashinfer._ops import route",
    ]
    assert imports_of("\n".join(lines), ("jit",)) == {
        "norm", "cli/main", "jit", "jit/spec", "jit/machine/target", "_ops/route"
    }  # fmt: skip
    assert [layer_of(name) for name in ("jit/machine/target", "jit", "jit/load", "norm", "comm/mnnvl", "jit/spec")] == [
        "jit/machine", "jit", "jit", "", "", "ground"
    ]  # fmt: skip
