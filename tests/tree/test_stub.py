"""``flashinfer/__init__.pyi`` lists public names.

The package, type checkers and these tests read this file.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

import flashinfer

from ..support.tree import ROOT, copy_tree, public_modules

STUB = ROOT / "flashinfer" / "__init__.pyi"
NAMES = {name: module for name, module in flashinfer._names().items() if module != "."}


def check(tree) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/init_stub.py", "--check"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def test_the_lists_are_up_to_date():
    done = check(ROOT)
    assert done.returncode == 0, done.stderr


def test_the_stub_is_python_and_is_read_as_python():
    """The package splits lines, and ``ast`` finds the same names and modules."""
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    parsed = {one.name: f".{node.module or ''}" for node in imports for one in node.names}
    assert all(one.asname == one.name for node in imports for one in node.names)
    assert parsed == flashinfer._names() and len(NAMES) > 150


@pytest.mark.parametrize("name", public_modules())
def test_the_stub_and_the_modules_agree(name):
    """Every name of ``__all__`` is defined once, and listed with that module unless the module is private."""
    module = importlib.import_module(f"flashinfer.{name}")
    public = list(getattr(module, "__all__", ()))
    assert len(set(public)) == len(public)
    missing = [one for one in public if not hasattr(module, one)]
    assert not missing, f"flashinfer.{name} has no {missing}"
    listed = {one for one, home in NAMES.items() if home == f".{name}"}
    assert listed in (set(public), set())
    assert flashinfer._names()[name] == "." and getattr(flashinfer, name) is module
    for one in listed:
        assert getattr(flashinfer, one) is getattr(module, one) and one in dir(flashinfer)


def test_a_name_that_is_not_listed_is_noticed(tmp_path):
    """A function, an operator and a module are added without running the script."""
    tree = copy_tree(tmp_path / "tree")
    assert check(tree).returncode == 0
    (tree / "flashinfer" / "new.py").write_text('__all__ = ["new_function"]\n\n\ndef new_function() -> None: ...\n')
    norm = tree / "flashinfer" / "norm_quant.py"
    norm.write_text(norm.read_text().replace('"rmsnorm_quant(Tensor', '"rmsnorm_quant_(Tensor'))
    done = check(tree)
    assert done.returncode == 1 and "__init__.pyi is out of date" in done.stderr and "schemas.py is" in done.stderr
    subprocess.run([sys.executable, "scripts/init_stub.py"], cwd=tree, check=True)
    assert check(tree).returncode == 0
    assert "from .new import new_function as new_function\n" in (tree / "flashinfer" / "__init__.pyi").read_text()
    assert "flashinfer::rmsnorm_quant_(" in (tree / "flashinfer" / "_ops" / "schemas.py").read_text()


def test_unknown_names_are_attribute_errors():
    for name in ("no_such_name", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'flashinfer' has no attribute '{name}'"):
            getattr(flashinfer, name)


def test_the_package_is_typed():
    assert (ROOT / "flashinfer" / "py.typed").is_file()
