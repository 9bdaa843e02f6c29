"""Write the two lists of names that the package reads: public names, and operators with their schemas.

python scripts/init_stub.py            # after a name or an operator was added
python scripts/init_stub.py --check    # exit with 1 if a list is out of date

``flashinfer/__init__.pyi`` maps each public name to the one module that its first use imports; type checkers
and editors read it too. ``flashinfer/_ops/schemas.py`` maps each module to its operators, for programs saved
with them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import symtable
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this tree, even if another one is installed
sys.modules["flashinfer._ops.schemas"] = ModuleType("flashinfer._ops.schemas")
sys.modules["flashinfer._ops.schemas"].SCHEMAS = {}  # type: ignore[attr-defined] # the list that is made here

import flashinfer  # noqa: E402
from flashinfer._ops import registry  # noqa: E402

# These names are found only in the module, because another family or library has some of them too.
OWN_NAMES = {
    "cli", "deep_gemm", "delta_rule", "dsv3_ops", "env", "errors", "gdn_kernels", "integrations", "jit", "profiler",
    "testing", "tllm_enums", "topk", "triton", "utils", "xqa",
}  # fmt: skip
WITHOUT_OPERATORS = {"__main__", "cli", "integrations", "jit"}

STUB_HEAD = '''"""List every public name with its module: ``flashinfer.<name>`` imports that module on its first use.

``python scripts/init_stub.py`` writes this file from the modules' ``__all__``.
"""

'''
STUB_TAIL = """
__version__: str

def __dir__() -> list[str]: ...
"""
SCHEMAS_HEAD = '''"""List the operators of each Python module; ``python scripts/init_stub.py`` writes this file. See ``registry.py``."""

SCHEMAS: dict[str, tuple[str, ...]] = {
'''


def public_modules() -> list[str]:
    """Return the names of the package's public modules."""
    return sorted(module.name for module in pkgutil.iter_modules(flashinfer.__path__) if module.name[0] != "_")


def stub() -> str:
    """Return the text of ``flashinfer/__init__.pyi``."""
    lines = [f"from . import {name} as {name}\n" for name in public_modules()]
    for name in public_modules():
        if name not in OWN_NAMES:
            module = importlib.import_module(f"flashinfer.{name}")
            written = names_in(module)
            # Type checkers cannot see a name that the module creates during its import.
            lines += [
                f"from .{name} import {one} as {one}{'' if one in written else '  # type: ignore[attr-defined]'}\n"
                for one in sorted(module.__all__)
            ]
    return STUB_HEAD + "".join(lines) + STUB_TAIL


def names_in(module: ModuleType) -> set[str]:
    """Return the names that a module's text defines at its top level."""
    return {one.get_name() for one in symtable.symtable(inspect.getsource(module), "", "exec").get_symbols()}


def schemas(found: dict[str, list[str]]) -> str:
    """Return the text of ``flashinfer/_ops/schemas.py`` for the operators that ``record`` found."""
    for module in pkgutil.iter_modules(flashinfer.__path__, "flashinfer."):
        if module.name.split(".")[1] not in WITHOUT_OPERATORS:
            package = importlib.import_module(module.name)
            for inner in pkgutil.walk_packages(getattr(package, "__path__", []), f"{module.name}."):
                importlib.import_module(inner.name)
    lines = []
    for name in sorted(found):
        lines += [f"    {json.dumps(name)}: (\n", *(f"        {json.dumps(one)},\n" for one in found[name]), "    ),\n"]
    return SCHEMAS_HEAD + "".join(lines) + "}\n"


def record() -> dict[str, list[str]]:
    """Record from now on which module declares which operators."""
    found: dict[str, list[str]] = {}
    declare = registry.register

    def recording(namespace: str, schema: str, *rest: object) -> str:
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>":
            assert frame.f_back is not None
            frame = frame.f_back
        found.setdefault(frame.f_globals["__name__"], []).append(f"{namespace}::{schema}")
        return declare(namespace, schema, *rest)  # type: ignore[arg-type]

    registry.register = recording
    return found


def main() -> int:
    """Write both files, or compare them; return the exit status."""
    found = record()
    texts = {"flashinfer/__init__.pyi": stub(), "flashinfer/_ops/schemas.py": schemas(found)}
    old = [name for name, text in texts.items() if (ROOT / name).read_text() != text]
    if "--check" not in sys.argv[1:]:
        for name in old:
            (ROOT / name).write_text(texts[name])
        return 0
    for name in old:
        print(f"{name} is out of date: run python scripts/init_stub.py", file=sys.stderr)
    return bool(old)


if __name__ == "__main__":
    sys.exit(main())
