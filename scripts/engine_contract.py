"""Compare a serving engine's uses of flashinfer with the contract and with this tree.

    python scripts/engine_contract.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl     # wheels, or folders of
    sources python scripts/engine_contract.py --all vllm-0.33.0-*.whl                   # every use, also
    known ones

An engine's Python is read and never run. A use is an import, a question (``hasattr``, ``getattr``,
``find_spec``, a parameter in ``inspect.signature``), an attribute, or a call with its number of positional
arguments and its keywords. Names are followed through assignments, functions that wrap an import, and modules
of the engine that pass them on.

The script prints a line for each use that tests/integrations/contract does not know, for each name that the
contract calls served and this tree lacks, and for each call that this tree refuses. With any line the exit
code is 1.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this tree, even if another one is installed

from tests.integrations.contract import facts  # noqa: E402

PACKAGE = "flashinfer"
LOOKS_UP = re.compile("import|find_spec|submodule|hasattr")  # functions that take a name of this package as text
METHODS = {"plan", "run", "begin_forward", "forward", "forward_return_lse", "run_return_lse", "end_forward"}


@dataclass(frozen=True)
class Use:
    """One use of a name. ``kind`` is import, question, attribute or call; ``detail`` a call's arguments."""

    kind: str
    name: str
    detail: tuple[Any, ...] = ()
    guarded: bool = False
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}"
        if self.kind in ("call", "method"):
            positional, keywords = self.detail
            words = [*["_"] * positional, *(f"{name}=" if name != "**" else name for name in keywords)]
            text += f"({', '.join(words)})"
        elif self.detail:
            text += f" {self.detail[0]}"
        return f"{text}{' (guarded)' if self.guarded else ''}  {self.place}"


def sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each Python file of a wheel or of a folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*.py")):
            yield str(file.relative_to(path)), file.read_text(errors="replace")
        return
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                yield name, archive.read(name).decode(errors="replace")


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_ours(name: str | None) -> bool:
    return name is not None and (name == PACKAGE or name.startswith(f"{PACKAGE}."))


def text_of(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def form_of(node: ast.Call) -> tuple[int, tuple[str, ...]]:
    """Return the number of positional arguments of a call, and its keywords; ``**`` for a dictionary's."""
    return len(node.args), tuple(one.arg or "**" for one in node.keywords)


def catches_absence(handler: ast.ExceptHandler) -> bool:
    caught = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"Exception"}
    )
    return bool(caught & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"})


class Reader(ast.NodeVisitor):
    """Reader of one module: its names for objects of this package, and its uses."""

    def __init__(self, file: str, exported: dict[str, str]) -> None:
        self.file, self.exported, self.module = file, exported, module_of(file)
        self.is_package = file.endswith("__init__.py")
        self.scopes: list[dict[str, str]] = [{}]
        self.returns: dict[str, str] = {}
        self.guards = 0
        self.uses: list[Use] = []
        self.wrappers: set[str] = set()
        self.methods: list[tuple[str, ast.Call]] = []
        self.private: list[tuple[str, int]] = []
        self.types_only = False

    # Names

    def find(self, name: str) -> str | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def resolve(self, node: ast.AST | None) -> str | None:
        """Return the dotted name in this package that an expression refers to."""
        if isinstance(node, ast.Name):
            return self.find(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                return self.find(f"self.{node.attr}")
            owner = self.resolve(node.value)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.BoolOp | ast.IfExp):
            values = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next((found for value in values if (found := self.resolve(value))), None)
        if isinstance(node, ast.Call):
            return self.made(node)
        return None

    def made(self, node: ast.Call) -> str | None:
        """Return the name in this package that a call returns: ``getattr``, an import by name, a wrapper."""
        texts = [text_of(arg) for arg in node.args]
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function == "getattr" and len(texts) > 1 and texts[1]:
            owner = self.resolve(node.args[0])
            return f"{owner}.{texts[1]}" if owner else None
        if texts and texts[0] and is_ours(texts[0]) and ("." in texts[0] or LOOKS_UP.search(function)):
            if " " in texts[0]:
                return None
            if len(texts) > 1 and texts[1] and texts[1].isidentifier():
                return f"{texts[0]}.{texts[1]}"
            return texts[0] if len(texts) == 1 else None
        if function == "partial" and node.args:
            return None
        if not node.args and not node.keywords:
            return self.returns.get(function) or self.exported.get(f"{self.module}.{function}()")
        return None

    def bind(self, target: ast.AST, name: str) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = name
        elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") in ("self", "cls"):
            self.scopes[0][f"self.{target.attr}"] = name

    def note(self, kind: str, name: str, node: ast.AST, *detail: Any) -> None:
        if not self.types_only:
            place = f"{self.file}:{getattr(node, 'lineno', 0)}"
            self.uses.append(Use(kind, name, detail, bool(self.guards), place))

    # Statements

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            if is_ours(one.name):
                self.note("import", one.name, node)
                self.scopes[-1][one.asname or PACKAGE] = one.name if one.asname else PACKAGE
            elif one.asname and one.name in self.exported:
                self.scopes[-1][one.asname] = self.exported[one.name]
            elif one.asname:
                self.scopes[-1][one.asname] = f"<{one.name}>"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.module.split(".")
            parts = parts[: len(parts) - node.level + self.is_package]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        for one in node.names:
            name = f"{base}.{one.name}"
            if is_ours(base):
                self.note("import", name, node)
                self.scopes[-1][one.asname or one.name] = name
                if one.name.endswith("Wrapper"):
                    self.wrappers.add(name)
            elif name in self.exported:
                self.scopes[-1][one.asname or one.name] = self.exported[name]
            elif f"{name}()" in self.exported:
                self.returns[one.asname or one.name] = self.exported[f"{name}()"]
            elif self.find(one.asname or one.name):
                self.scopes[-1].pop(one.asname or one.name, None)
            else:
                self.scopes[-1][one.asname or one.name] = f"<{name}>"

    def visit_Assign(self, node: ast.Assign) -> None:
        name = self.resolve(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    if found := self.resolve(value):
                        self.bind(one, found)
            elif is_ours(name) and name:
                self.bind(target, name)
            elif isinstance(target, ast.Name) and is_ours(self.scopes[-1].get(target.id)) and not is_none(node.value):
                self.scopes[-1].pop(target.id)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        named = {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
        before, self.types_only = self.types_only, self.types_only or "TYPE_CHECKING" in named
        self.visit(node.test)
        for one in node.body:
            self.visit(one)
        self.types_only = before
        for one in node.orelse:
            self.visit(one)

    def visit_Try(self, node: ast.Try) -> None:
        guard = any(catches_absence(handler) for handler in node.handlers)
        self.guards += guard
        for one in node.body:
            self.visit(one)
        self.guards -= guard
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for one in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if one is not None:
                self.visit(one)
        globals_ = {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
        self.scopes.append({})
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.scopes[-1][one.arg] = "<argument>"
        for one in node.body:
            self.visit(one)
            if isinstance(one, ast.Return) and (name := self.resolve(one.value)) and is_ours(name):
                self.returns[node.name] = name
        scope = self.scopes.pop()
        self.scopes[0] |= {name: scope[name] for name in globals_ if is_ours(scope.get(name))}

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.resolve(node)
        if is_ours(name) and name:
            self.note("attribute", name, node)
            return
        if node.attr[0] == "_" and node.attr[1] != "_" and getattr(node.value, "id", "") not in ("self", "cls"):
            self.private.append((node.attr, node.lineno))
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Record ``"group" in inspect.signature(f).parameters``, also with a variable for the parameters."""
        asked = text_of(node.left)
        if asked and isinstance(node.ops[0], ast.In | ast.NotIn):
            name = self.signature_of(node.comparators[0])
            if name:
                self.note("question", name, node, f"parameter {asked}")
        self.generic_visit(node)

    def signature_of(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            name = self.find(f"parameters of {node.id}")
            return name
        for one in ast.walk(node):
            if isinstance(one, ast.Call) and getattr(one.func, "attr", getattr(one.func, "id", "")) == "signature":
                name = self.resolve(one.args[0]) if one.args else None
                return name if is_ours(name) else None
        return None

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [text_of(arg) for arg in node.args]
        if function in ("hasattr", "getattr") and len(texts) > 1 and texts[1]:
            owner = self.resolve(node.args[0])
            if is_ours(owner):
                asks = function == "hasattr" or len(node.args) > 2
                self.note("question" if asks else "attribute", f"{owner}.{texts[1]}", node)
        elif function not in ("debug", "info", "warning", "error", "startswith") and (name := self.made(node)):
            if is_ours(name):
                self.note("question", name, node)
        elif function in METHODS and isinstance(node.func, ast.Attribute) and not self.resolve(node.func):
            if not isinstance(node.func.value, ast.Attribute) or node.func.value.attr != "_cached_module":
                self.methods.append((function, node))
        elif not any(isinstance(arg, ast.Starred) for arg in node.args):
            called = self.resolve(node.func)
            if called and is_ours(called):
                self.note("call", called, node, *form_of(node))
        self.generic_visit(node)

    def visit_List(self, node: ast.List | ast.Tuple) -> None:
        """Record ``[("flashinfer.comm", "Mapping"), ...]``: rows of names that are looked up."""
        rows = [[text_of(part) for part in one.elts] for one in node.elts if isinstance(one, ast.Tuple)]
        rows = [row for row in rows if len(row) == 2 and all(row) and is_ours(row[0])]
        if any("." in str(row[0]) for row in rows):
            for row in rows:
                self.note("question", f"{row[0]}.{row[1]}", node)
        self.generic_visit(node)

    visit_Tuple = visit_List  # type: ignore[assignment]


def read(path: Path) -> list[Use]:
    """Return the uses of an engine, the first of each kind."""
    trees = {}
    for file, text in sources(path):
        if PACKAGE in text or "fi_utils" in text:
            try:
                trees[file] = ast.parse(text)
            except SyntaxError:
                continue
    exported: dict[str, str] = {}
    for _ in range(3):  # names pass through a few modules
        readers = []
        for file, tree in trees.items():
            reader = Reader(file, exported)
            reader.visit(tree)
            readers.append(reader)
        for reader in readers:
            exported |= {f"{reader.module}.{name}": value for name, value in reader.scopes[0].items() if is_ours(value)}
            exported |= {f"{reader.module}.{name}()": value for name, value in reader.returns.items()}
    uses: dict[Use, Use] = {}
    for reader in readers:
        for use in reader.uses:
            uses.setdefault(use, use)
        for method, node in reader.methods if reader.wrappers else ():
            name = f"{'|'.join(sorted(reader.wrappers))}.{method}"
            use = Use("method", name, form_of(node), False, f"{reader.file}:{node.lineno}")
            uses.setdefault(use, use)
        for name, line in reader.private if reader.wrappers else ():
            use = Use("private", f"{PACKAGE}.wrapper.{name}", (), False, f"{reader.file}:{line}")
            uses.setdefault(use, use)
    return list(uses)


def own(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


def complaint(use: Use) -> str | None:
    """Return the fault of a use: it is unknown, or this tree refuses it."""
    name = own(use.name)
    if use.kind == "private":
        return None if name.split(".")[-1] in {*facts.PRIVATE, *facts.ENGINES_OWN} else "unknown"
    if use.kind == "method":
        wrappers, _, method = name.rpartition(".")
        names = [f"{own(wrapper)}.{method}" for wrapper in wrappers.split("|")]
        known = [fact for one in names if (fact := facts.known(one))]
        if known and all(one.state == "absent" for one in known):
            return None
        forms = [form for one in names for form in known_forms(one, use)]
        if not any(form.elsewhere for form in forms) and all(facts.refusal(one, *use.detail, True) for one in names):
            return "refused"
        return None if forms else "unknown"
    if use.name == PACKAGE or (not use.detail and any(one.startswith(f"{name}.") for one in facts.NAMES)):
        return None  # a module that has known names
    fact = facts.known(name)
    if fact is None:
        return "unknown"
    if fact.state == "serves" and facts.state_of(name) != "serves":
        return "missing"
    if fact.state == "serves" and use.kind == "question" and use.detail:
        parameter = use.detail[0].removeprefix("parameter ")
        asked = {one for question in facts.QUESTIONS for one in question.asked}
        return None if asked & {f"{name}({parameter})", f"{name}(*{parameter})"} else "unknown"
    if fact.state == "serves" and use.kind == "call":
        forms = known_forms(name, use)
        if not any(form.elsewhere for form in forms) and facts.refusal(name, *use.detail, facts.is_method(name)):
            return "refused"
        return None if forms else "unknown"
    return None


def known_forms(name: str, use: Use) -> list[facts.Form]:
    """Return the forms of the facts with all keywords of a call, and at least its positional arguments."""

    positional, keywords = use.detail
    return [
        form
        for form in facts.CALLS
        if form.name == name and positional <= form.positional and {*keywords} <= {*form.keywords, "**"}
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", type=Path, help="wheels, or folders of sources")
    parser.add_argument("--all", action="store_true", help="print every use")
    options = parser.parse_args(arguments)
    failures = 0
    for path in options.engines:
        for use in sorted(read(path), key=lambda use: (use.name, use.kind, str(use.detail))):
            trouble = complaint(use)
            failures += trouble is not None
            if trouble or options.all:
                print(f"{trouble or 'known'}: {use}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
