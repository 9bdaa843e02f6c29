"""Versions of the tools, which change the bytes of an artifact. Each version of a tool is asked once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from ...errors import ToolchainError
from .. import process
from .environment import compiler_environment
from .workspace import workspace_root, write_atomically

Identity = dict[str, str | bool | None]

_answers: dict[str, str] = {}


def identity_of(cxx: str, nvcc: str | None, writes: bool = True) -> Identity:
    # Every supported torch has this ABI. Existing keys contain it, so it stays until the next spec.FORMAT.
    return {"cxx": version_of(cxx, writes), "nvcc": version_of(nvcc, writes) if nvcc else None, "cxx11_abi": True}


def version_of(program: str, writes: bool = True) -> str:
    """Return a compiler's version without its name, because ``g++`` and ``c++`` may be the same compiler."""
    try:
        key = _fingerprint(program)
    except OSError:
        return _ask_version(program)
    if key not in _answers:
        file = workspace_root() / "answers" / hashlib.sha256(os.fsencode(key)).hexdigest()[:32]
        try:
            (_answers[key],) = json.loads(file.read_bytes())  # a truncated file raises
        except (OSError, ValueError, TypeError):
            _answers[key] = _ask_version(program)
            if writes:
                with suppress(OSError):  # the next process asks again
                    write_atomically(file, json.dumps([_answers[key]]).encode())
    return _answers[key]


def _ask_version(program: str) -> str:
    command, variables = [program, "--version"], compiler_environment()
    try:
        run = process.run(command, timeout=60, env=variables)
        run.check_returncode()
    except (OSError, subprocess.SubprocessError) as err:
        detail = getattr(err, "stderr", "") or str(err)
        raise ToolchainError(f"{' '.join(command)} does not answer: {detail.strip()}") from None
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    release = [line for line in lines if line.startswith("Cuda compilation tools")]
    # nvcc prints its version near the end, g++ and clang++ in the first line after their name.
    return release[0] if release else re.sub(r"^\S+\s+", "", lines[0]) if lines else "unknown"


def _fingerprint(path: str) -> str:
    """Return text that identifies a program on disk. A script's text includes the programs that it names."""
    real = os.path.realpath(path)
    parts = [_stamp(real)]
    if os.path.getsize(real) < 65536:
        text = Path(real).read_bytes()
        parts.append(hashlib.sha256(text).hexdigest())
        named = sorted({os.fsdecode(word) for word in re.findall(rb"/[\w./+-]+", text)})
        parts += map(_stamp, filter(shutil.which, named if text.startswith(b"#!") else []))
    return "|".join(parts)


def _stamp(path: str) -> str:
    status = os.stat(path)
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"
