"""Layers of Python: the command line above the library, that above the build system; nothing generic knows attention."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from ..support.tree import ROOT

PACKAGE = ROOT / "flashinfer"
# A room by its folder -> what it may import from; a file of the package itself is in the room "", but for the ground, which all stand on.
GROUND = {"env", "errors", "jit/events", "jit/process", "jit/report", "jit/spec", "jit/closure"}
ROOMS = {
    "ground": set[str](),
    "jit/machine": {"ground"},
    "jit/worker": set(),
    "jit/host": {"ground", "jit/machine", "jit/worker"},
    "jit": {"ground", "jit/machine", "jit/host", "jit/worker", "jit/modules"},
    "jit/cluster": {"ground", "jit", "jit/machine", "jit/host", "jit/worker"},
    "jit/modules": {"ground", "jit", "jit/machine"},
    "_ops": {"ground", "jit"},
    "_compat": {"ground"},
    "_attention": {"ground", "jit", "jit/modules", "_ops", ""},
    "": {"ground", "jit", "jit/machine", "jit/modules", "_ops", "_attention", "_compat"},
    "integrations": {"ground", "jit", "jit/modules", "", "_ops", "_attention"},
    "cli": {"ground", "jit", "jit/cluster", "jit/machine", "jit/host", "jit/modules", ""},
}
# Who knows attention: its families and what they share.
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
}


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """``jit/spec`` of a file, ``jit`` of a package."""
    return str(path.relative_to(PACKAGE).with_suffix("")).removesuffix("__init__").rstrip("/")


def room_of(name: str) -> str:
    if name in GROUND:
        return "ground"
    if name == "__main__":
        return "cli"
    folder = name if (PACKAGE / name).is_dir() else str(Path(name).parent)
    while folder not in ROOMS and folder not in ("", "."):
        folder = str(Path(folder).parent)
    return "" if folder in ("", ".") else folder


@cache
def imported(path: Path) -> frozenset[str]:
    """What of the package a file imports anywhere in it, functions and type checks included."""
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
            # A name that is imported from a package may be one of its files.
            names = [f"{inner}/{one.name}".lstrip("/") if is_there(inner, one.name) else inner for one in node.names]
        elif isinstance(node, ast.Import):
            names = ["/".join(one.name.split(".")[1:]) for one in node.names if one.name.split(".")[0] == "flashinfer"]
        found.update(names)
    return frozenset(found)


def is_there(folder: str, name: str) -> bool:
    place = PACKAGE / folder / name
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_a_file_imports_from_its_room_and_those_below(path):
    room = room_of(name_of(path))
    for name in imported(path):
        assert room_of(name) in ROOMS[room] | {room}, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_nothing_generic_imports_attention(path):
    name = name_of(path)
    if {*Path(name).parts} & ATTENTION or room_of(name) == "integrations":
        return
    known = {one for one in imported(path) if {*Path(one).parts} & ATTENTION}
    assert not known, f"{name} imports {', '.join(sorted(known))}"


def test_imports_have_no_cycle():
    """Those inside of functions too, and those for type checkers."""
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


def test_imports_are_seen_wherever_they_stand(tmp_path):
    """Relative ones, those in functions, and those by the package's name."""
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
    assert [room_of(name) for name in ("jit/machine/target", "jit", "jit/load", "norm", "comm/mnnvl", "jit/spec")] == [
        "jit/machine", "jit", "jit", "", "", "ground"
    ]  # fmt: skip
