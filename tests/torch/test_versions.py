"""Tests for other releases of torch and Python, and of the script that runs the tests there."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import subprocess
import sys
from functools import cached_property
from types import ModuleType

import pytest

import flashinfer
from flashinfer._attention.arguments import Logits
from flashinfer._attention.signature import CallArguments, Parameters

from ..support.tree import ROOT

OPTIONAL = ("flashinfer.integrations.", "flashinfer.jit.cluster.", "flashinfer.__main__")  # they need other packages


def modules() -> list[ModuleType]:
    """Import every module of the package without optional requirements."""
    names = (module.name for module in pkgutil.walk_packages(flashinfer.__path__, "flashinfer."))
    return [importlib.import_module(name) for name in names if not name.startswith(OPTIONAL)]


def test_no_module_holds_an_object_of_itertools():
    """Dynamo copies such a global when it traces a plan, and Python 3.12 deprecates copies of itertools' objects."""
    held = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if type(value) in vars(itertools).values()
    ]
    assert not held, held


@pytest.mark.parametrize("options", [Logits, CallArguments, Parameters], ids=lambda options: options.__name__)
def test_tuples_that_graphs_read_have_no_properties(options):
    """Dynamo of torch 2.10 evaluates a property of a named tuple on proxies, and a proxy is in no table."""
    assert not [name for name, value in vars(options).items() if isinstance(value, (property, cached_property))]


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "try_torch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_invalid_versions_are_refused():
    done = script("newest")
    assert done.returncode == 2 and "version: got 'newest', wanted a release of torch such as 2.15.0" in done.stderr


def test_the_script_installs_the_dependencies():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    program = "import sys; sys.path.insert(0, 'scripts'); import try_torch; print(*try_torch.dependencies(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == project["dependencies"]
