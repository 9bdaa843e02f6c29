"""Processes of a build write down for each other who has a lock, what a compiler made and from what."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress

TYPE_CHECKING = False  # a name that mypy knows: importing typing would take a third of what all else takes
if TYPE_CHECKING:
    from typing import Any

RUN = "run.json"  # what the builder says to the units of one module, beside their files
UNIT = "flashinfer-unit "  # begins a line that a unit prints; the rest is JSON: file and command, later file and code


def read_note(descriptor: int) -> dict[str, Any]:
    """Returns what the holder of a lock says of itself; empty where that cannot be read, or is just being written."""
    with suppress(OSError, ValueError):
        note = json.loads(os.pread(descriptor, 4096, 0))
        return note if isinstance(note, dict) else {}
    return {}


def read_note_at(path: str) -> dict[str, Any]:
    """Returns the note that lies there; empty where there is none, or not a whole one."""
    with suppress(OSError), open(path) as file:
        return read_note(file.fileno())
    return {}


def write_note(descriptor: int, note: dict[str, Any]) -> None:
    data = json.dumps(note).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def is_made(file: str, folder: str = "") -> bool:
    """Whether ``file`` is what its compiler made, and what it was made from is unchanged. ``folder``: where ninja ran."""
    path = os.path.join(folder, file)
    record = read_note_at(f"{path}.json")
    with suppress(OSError):
        return file_digest(path) == record.get("object") and inputs_digest(path, folder) == record.get("inputs")
    return False


def inputs_digest(file: str, folder: str = "") -> str:
    """One digest of all that an object was made from: a record stays short, whatever a compiler reads."""
    with open(f"{file}.d") as text:
        names = [os.path.join(folder, name) for name in read_depfile(text.read())]
    # nvcc lists the names in #line directives too, which need not be files.
    digests = " ".join(file_digest(name) if os.path.isfile(name) else "none" for name in names)
    return hashlib.sha256(digests.encode()).hexdigest()


def file_digest(file: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes."""
    with open(file, "rb") as data:
        return hashlib.sha256(data.read()).hexdigest()


def read_depfile(text: str) -> list[str]:
    """The prerequisites in a depfile of gcc or nvcc, unescaped."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\.|[^\s\\])+", names)]
