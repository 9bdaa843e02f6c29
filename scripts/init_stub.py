"""Writes flashinfer/__init__.pyi: what ``flashinfer.<name>`` finds when it is used, for type checkers and editors.

python scripts/init_stub.py            # after a public name was added; tests/tree/test_stub.py compares
"""

from __future__ import annotations

import inspect
import symtable
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree's names, whichever one is installed

import flashinfer

HEAD = '''"""Made by scripts/init_stub.py: names that flashinfer/__init__.py finds when they are used."""

from typing import Any

'''
TAIL = """
__version__: str

def __dir__() -> list[str]: ...
"""


def stub() -> str:
    """The text of the file."""
    modules = {module.__name__.rsplit(".", 1)[1]: module for module in flashinfer._modules()}
    lines = [f"from . import {name} as {name}\n" for name in sorted({*modules, *flashinfer._APART})]
    found = [(name, public) for name, module in modules.items() for public in module.__all__]
    written = {name: names_in(module) for name, module in modules.items()}
    lines += [f"from .{name} import {one} as {one}\n" for name, one in found if one in written[name]]
    # Of a name that stands nowhere in its module's text, such as what is not there yet, nothing more is known.
    others = [f"\n{one}: Any" for name, one in found if one not in written[name]]
    return HEAD + "".join(lines) + "".join(others) + TAIL


def names_in(module: ModuleType) -> set[str]:
    """What a module's text defines at its top level."""
    return {one.get_name() for one in symtable.symtable(inspect.getsource(module), "", "exec").get_symbols()}


if __name__ == "__main__":
    (Path(flashinfer.__file__).parent / "__init__.pyi").write_text(stub())
