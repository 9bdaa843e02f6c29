"""Facts about what engines take of flashinfer, one line each, read from the text files of this folder.

``names.txt``: names and what this library does with each. ``calls.txt``: forms of calls. ``questions.txt``: what an
engine asks before it chooses, our answer, and the calls that follow a yes. ``private.txt``: attributes of wrappers.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import FunctionType
from typing import Any

FOLDER = Path(__file__).parent
STUB = re.compile(r"Raises? ``UnsupportedError``")


@dataclass(frozen=True)
class Name:
    """A name below ``flashinfer`` and its state: ``serves``, ``raises`` or ``absent``."""

    name: str
    state: str
    engines: str
    use: str
    capability: str
    reason: str


@dataclass(frozen=True)
class Form:
    """A form of a call: the number of positional arguments and the keywords."""

    name: str
    engines: str
    positional: int
    keywords: tuple[str, ...]
    elsewhere: str


@dataclass(frozen=True)
class Question:
    """Question of an engine: whether all names of ``asked`` exist. A yes is followed by ``calls``."""

    engine: str
    capability: str
    use: str
    answer: str
    asked: tuple[str, ...]
    calls: tuple[str, ...]


def _rows(file: str, cells: int) -> Iterator[list[str]]:
    for number, line in enumerate((FOLDER / file).read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            row = [cell.strip() for cell in line.split("|")]
            if len(row) > cells:
                raise ValueError(f"{file}:{number}: got {len(row)} cells, wanted {cells}")
            yield row + [""] * (cells - len(row))


NAMES = {row[0]: Name(*row) for row in _rows("names.txt", 6)}
CALLS = [
    Form(name, who, int(count), tuple(words.split()), gpu) for name, who, count, words, gpu in _rows("calls.txt", 5)
]
QUESTIONS = [Question(*row[:4], tuple(row[4].split()), tuple(row[5].split())) for row in _rows("questions.txt", 6)]
PRIVATE = {row[0]: row for row in _rows("private.txt", 3)}

# Private attributes of an engine's own objects, in files that import wrappers.
ENGINES_OWN = """
    _k_scale_float _v_scale_float _q_scale_float _o_scale_float _q_scale _k_scale _v_scale _context _new_tokens
    _C_cache_ops _planned_backend _use_sparse_mha _logging _dynamo _swa_kv_pool _cutedsl_wrapper _cutedsl_scales
    _cutedsl_input_scale
""".split()  # noqa: SIM905


def known(name: str) -> Name | None:
    """Return the fact about a name: its own, that of its module (``x.*``), or that of the class or value around it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for key in (".".join(parts[:length]), ".".join(parts[:length]) + ".*"):
            if key in NAMES:
                return NAMES[key]
    return None


def find(name: str) -> Any:
    """Return the object that a name below ``flashinfer`` stands for.

    Raises:
        LookupError: there is none.
    """
    parts = ["flashinfer", *name.split(".")]
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            break
        return found
    raise LookupError(f"flashinfer.{name}")


def state_of(name: str) -> str:
    """Return ``serves``, ``raises`` or ``absent``, as this tree has it."""
    try:
        found = find(name)
    except LookupError:
        return "absent"
    return "raises" if STUB.match(getattr(found, "__doc__", None) or "") else "serves"


def is_asked(name: str) -> bool:
    """Return the answer to one name of a question, which may be a parameter."""
    function, parameter, _ = re.fullmatch(r"([\w.]+)(?:\((\*?\w+)\))?()", name).groups()  # type: ignore[union-attr]
    try:
        found = find(function)
    except LookupError:
        return False
    if parameter is None:
        return True
    parameters = inspect.signature(found).parameters
    only = parameter.startswith("*")
    given = parameters.get(parameter.lstrip("*"))
    return given is not None and (not only or given.kind is inspect.Parameter.KEYWORD_ONLY)


def refusal(name: str, positional: int, keywords: tuple[str, ...], method: bool = False) -> str | None:
    """Return why a signature of this tree refuses a form of a call, or ``None``."""
    named = {word: None for word in keywords if word != "**"}
    try:
        signature = inspect.signature(find(name))
        bind = signature.bind_partial if "**" in keywords else signature.bind
        bind(*[None] * (positional + method), **named)
    except (LookupError, TypeError) as err:
        return str(err)
    return None


def is_method(name: str) -> bool:
    """Return whether a name is a method, whose first argument an engine does not give."""
    owner, _, last = name.rpartition(".")
    try:
        found = find(owner)
        return inspect.isclass(found) and isinstance(inspect.getattr_static(found, last), FunctionType | partialmethod)
    except (LookupError, AttributeError):
        return False
