"""The versions of the tools, which change bytes of the result, asked once for each version of a tool."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...errors import ToolchainError
from . import trust
from .workspace import workspace_root, write_atomically

Identity = dict[str, str | bool | None]


def identity_of(cxx: str, nvcc: str | None, torch_dir: Path, writes: bool = True) -> Identity:
    versions = {"cxx": version_of(cxx, writes), "nvcc": version_of(nvcc, writes) if nvcc else None}
    return {**versions, "cxx11_abi": cxx11_abi(torch_dir, writes)}


def version_of(program: str, writes: bool = True) -> str:
    """The version a compiler gives of itself, less its own name: ``g++`` and ``c++`` may be one. It runs once per version."""
    return _remembered(program, "version", lambda: _ask_version(program), writes)


def _ask_version(program: str) -> str:
    command, variables = [program, "--version"], {**os.environ, "LC_ALL": "C"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=variables)
    except (OSError, subprocess.SubprocessError) as err:
        detail = getattr(err, "stderr", "") or str(err)
        raise ToolchainError(f"{' '.join(command)} does not answer: {detail.strip()}") from None
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    release = [line for line in lines if line.startswith("Cuda compilation tools")]
    # nvcc tells its version near the end, g++ and clang++ in the first line behind their name.
    return release[0] if release else re.sub(r"^\S+\s+", "", lines[0]) if lines else "unknown"


def cxx11_abi(torch_dir: Path, writes: bool = True) -> bool:
    """Says what ``torch.compiled_with_cxx11_abi()`` does, without importing torch: libc10 exports functions of std::string."""
    library = torch_dir / "lib" / "libc10.so"
    mangled = b"__cxx1112basic_string"
    return _remembered(str(library), "cxx11_abi", lambda: str(mangled in library.read_bytes()), writes) == "True"


_answers: dict[tuple[str, str], str] = {}


def _remembered(path: str, question: str, ask: Callable[[], str], writes: bool) -> str:
    try:
        key = (_fingerprint(path), question)
    except OSError:
        return ask()
    if key not in _answers:
        folder = workspace_root() / "answers"
        file = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        try:
            (_answers[key],) = json.loads(file.read_bytes())  # cut short, it is no answer
        except (OSError, ValueError, TypeError):
            _answers[key] = ask()
            if writes:
                with suppress(OSError):  # the answer is right all the same; the next process asks again
                    trust.make_directories(folder)
                    write_atomically(file, json.dumps([_answers[key]]).encode())
    return _answers[key]


def _fingerprint(path: str) -> str:
    """Tells a program on disk from any other. A script that starts another program stands for that one too."""
    real = os.path.realpath(path)
    status = os.stat(real)
    parts = [f"{real}:{status.st_size}:{status.st_mtime_ns}"]
    if status.st_size < 65536:
        text = Path(real).read_bytes()
        parts.append(hashlib.sha256(text).hexdigest())
        if text.startswith(b"#!"):
            for word in sorted(set(re.findall(rb"/[\w./+-]+", text))):
                named = os.fsdecode(word)
                if os.path.isfile(named) and os.access(named, os.X_OK):
                    inner = os.stat(named)
                    parts.append(f"{named}:{inner.st_size}:{inner.st_mtime_ns}")
    return "|".join(parts)
