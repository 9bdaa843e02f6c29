"""Notes between the processes of a build: the holder of a lock, and the record of each compiler's output."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress

# mypy knows the name. Importing typing would take a third of the time of all other imports.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUN = "run.json"  # the builder's message to the compilers of one module, next to their files
# Begins a line that a worker prints. The rest is JSON: file and command, later file and code.
UNIT = "flashinfer-unit "


def read_note(descriptor: int) -> dict[str, Any]:
    """Return the note of a lock's holder. It is empty if it cannot be read or is being written."""
    with suppress(OSError, ValueError):
        note = json.loads(os.pread(descriptor, 4096, 0))
        return note if isinstance(note, dict) else {}
    return {}


def read_note_at(path: str) -> dict[str, Any]:
    """Return the note at ``path``. It is empty if there is no complete one."""
    with suppress(OSError), open(path) as file:
        return read_note(file.fileno())
    return {}


def write_note(descriptor: int, note: dict[str, Any]) -> None:
    data = json.dumps(note).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def is_made(file: str, folder: str = "") -> bool:
    """Return whether ``file`` is its compiler's output and its inputs are unchanged.

    ``folder``: ninja's directory.
    """
    path = os.path.join(folder, file)
    record = read_note_at(f"{path}.json")
    with suppress(OSError):
        return file_digest(path) == record.get("object") and inputs_digest(path, folder) == record.get("inputs")
    return False


def inputs_digest(file: str, folder: str = "") -> str:
    """Return one digest of an object's inputs, so that a record is short however many files they are."""
    with open(f"{file}.d") as text:
        names = [os.path.join(folder, name) for name in read_depfile(text.read())]
    # nvcc also lists names of #line directives, which need not be files.
    digests = " ".join(file_digest(name) if os.path.isfile(name) else "none" for name in names)
    return hashlib.sha256(digests.encode()).hexdigest()


def file_digest(file: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as data:
        return hashlib.sha256(data.read()).hexdigest()


def read_depfile(text: str) -> list[str]:
    """Return the prerequisites in a depfile of gcc or nvcc, unescaped."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|[^\s\\])+", names)]
