"""flashinfer/__init__.pyi names for type checkers what flashinfer/__init__.py finds when it is used."""

from __future__ import annotations

import ast
import importlib.util
from types import ModuleType

import pytest

import flashinfer

from ..support.tree import ROOT

STUB = ROOT / "flashinfer" / "__init__.pyi"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("init_stub", ROOT / "scripts" / "init_stub.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stub_is_up_to_date(script):
    assert STUB.read_text() == script.stub(), "run: python scripts/init_stub.py"


def test_what_the_stub_names_is_there():
    body = ast.parse(STUB.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    named = {(node.module, one.name) for node in imports for one in node.names}
    named |= {(None, ast.unparse(node.target)) for node in body if isinstance(node, ast.AnnAssign)}
    assert len(named) > 100
    for module, name in named:
        found = getattr(flashinfer, name)
        assert module is None or found is getattr(getattr(flashinfer, module), name)
    assert {name for _, name in named} >= {name for one in flashinfer._modules() for name in one.__all__}


def test_a_name_that_is_missing_is_noticed(script, monkeypatch):
    monkeypatch.setattr(flashinfer.norm, "__all__", [*flashinfer.norm.__all__, "new"])
    assert script.stub() != STUB.read_text() and "\nnew: Any\n" in script.stub()


def test_the_package_is_typed():
    assert (ROOT / "flashinfer" / "py.typed").is_file()
