"""The files a module is made of: its sources and every header of the library's or the user's that they reach, by content.

The scan follows the includes of both sides of every conditional. What it cannot see (a name that is a macro) the
compiler's dependency output reveals after the build, see ``run.check_dependencies``.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache

# Not tied to the start of a line: an include in a comment counts too, and the search jumps from # to #.
_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*([<"][^>"\n]+)[>"]')

# path -> (identity of the file on disk, digest, what it includes). ctime changes with every write, whatever
# happens to mtime, so an edit with a restored mtime is seen too. The clock of a file system ticks in milliseconds
# (some tick in seconds): what was written so recently that a next edit could bear the same time is not remembered.
_SETTLED = 2e9  # nanoseconds
_seen: dict[str, tuple[tuple[int, int, int, int], str, tuple[str, ...]]] = {}


def digest_and_includes(path: str) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of a file's bytes and what it includes (``<name`` or ``"name``), read again only when the file changed."""
    status = os.stat(path)
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = _seen.get(path)
    if known is not None and known[0] == stamp:
        return known[1], known[2]
    settled = status.st_ctime_ns < time.time_ns() - _SETTLED
    with open(path, "rb") as file:
        text = file.read()
    includes = tuple(os.fsdecode(name) for name in _INCLUDE.findall(text.replace(b"\\\n", b"")))
    result = hashlib.sha256(text).hexdigest(), includes
    if settled:
        _seen[path] = (stamp, *result)
    return result


def closure(sources: Iterable[str], include_dirs: Sequence[str]) -> dict[str, str]:
    """Every file of the library's or the user's reachable from ``sources`` -> its digest.

    A name is looked up as a compiler does: in quotes beside the file that includes it, then in ``include_dirs`` in
    order. A name found nowhere belongs to the system, to CUDA or to torch, which the toolchain's versions stand for.
    """
    # Most names are those of a few headers.
    find = cache(lambda name: next(filter(os.path.isfile, (_join(place, name) for place in include_dirs)), None))
    digests: dict[str, str] = {}
    todo = list(sources)
    while todo:
        path = todo.pop()
        if path in digests:
            continue
        digests[path], includes = digest_and_includes(path)
        for include in includes:
            name = include[1:]
            if include[0] == '"' and os.path.isfile(beside := _join(os.path.dirname(path), name)):
                todo.append(beside)
            elif (place := find(name)) is not None:
                todo.append(place)
    return digests


def _join(directory: str, name: str) -> str:
    path = f"{directory}/{name}"
    return os.path.normpath(path) if "/." in path else path
