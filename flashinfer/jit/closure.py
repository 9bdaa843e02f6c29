"""Files of a module by content: its sources and all headers of the library and the user that they reach.

The scan follows includes on both sides of every conditional. It cannot see a name that is a macro. The
compiler's dependency output reveals such a header after the build, see ``run.check_dependencies``.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache

# The pattern is not anchored: an include in a comment counts too, and the search jumps from # to #.
_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*([<"][^>"\n]+)[>"]')

# path -> (identity of the file on disk, digest, includes). ctime changes with every write, whatever happens
# to mtime, so an edit with a restored mtime is noticed. The clock of a file system ticks in milliseconds,
# some tick in seconds. A file written so recently that another edit could get the same time is not cached.
_SETTLED = 2e9  # nanoseconds
_seen: dict[str, tuple[tuple[int, int, int, int], str, tuple[str, ...]]] = {}


def digest_and_includes(path: str) -> tuple[str, tuple[str, ...]]:
    """Return a file's SHA-256 and its includes (``<name`` or ``"name``).

    A file is read again only if it changed.
    """
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
    """Return every file of the library or the user that ``sources`` reach -> its digest.

    Names are resolved as by a compiler: in quotes next to the including file, then in ``include_dirs`` in
    order. A name that is not found belongs to the system, to CUDA or to torch, whose versions enter the build
    key.
    """
    # Most includes name the same few headers.
    # Most names are those of a few headers.
    find = cache(lambda name: next(filter(os.path.isfile, (_join(folder, name) for folder in include_dirs)), None))
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
            elif (found := find(name)) is not None:
                todo.append(found)
    return digests


def _join(directory: str, name: str) -> str:
    path = f"{directory}/{name}"
    return os.path.normpath(path) if "/." in path else path
