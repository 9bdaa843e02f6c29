"""Compile each header by itself in few compiler runs, and skip headers that have not changed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "include"


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


@cache
def included(path: Path) -> frozenset[Path]:
    """Return the library's headers that a file includes directly or indirectly."""
    own = {INCLUDE / name for name in includes(path) if (INCLUDE / name).exists()}
    return frozenset(own.union(*(included(one) for one in own)))


def chains(paths: Iterable[Path]) -> list[list[Path]]:
    """Return chains of all headers. Each header follows only headers that it includes.

    A file that includes a chain in order compiles if and only if each of its headers compiles alone, because
    the text before a header is what the header itself includes.
    """
    found: list[list[Path]] = []
    for path in sorted(set(paths), key=lambda path: (len(included(path)), path)):
        extendable = [chain for chain in found if chain[-1] in included(path)]
        if extendable:
            max(extendable, key=lambda chain: len(included(chain[-1]))).append(path)
        else:
            found.append([path])
    return found


def compile_each(command: Sequence[str], paths: Iterable[Path], passed: Path | None = None) -> None:
    """Compile each header as if it were the only one of a file, several files at once.

    Args:
        passed: a folder with digests of text, command and compiler that compiled before. These are skipped.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout

    def problem(chain: list[Path]) -> str:
        texts = [path.read_bytes() for path in sorted({*chain, *included(chain[-1])})]
        key = hashlib.sha256(repr((version, command, [str(path) for path in chain], texts)).encode()).hexdigest()
        if passed is not None and (passed / key).exists():
            return ""
        words = [*command, f"-I{INCLUDE}"]
        for path in chain:
            words += ["-include", str(path)]
        done = subprocess.run([*words, os.devnull], capture_output=True, text=True)
        if done.returncode:
            return f"{', '.join(map(str, chain))}:\n{done.stderr}{done.stdout}"
        if passed is not None:
            (passed / key).touch()
        return ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = [text for text in pool.map(problem, chains(paths)) if text]
    assert not problems, "\n".join(problems)
