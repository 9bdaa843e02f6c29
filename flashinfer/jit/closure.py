"""The files a module is made of: its sources and every own header they reach, by content.

The scan over-approximates on purpose: it follows the includes of both sides of every conditional. What it
cannot see (an include whose name is a macro) the compiler's dependency output reveals after the build, and
``build.check_dependencies`` turns that into an error.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)

# path -> (identity of the file on disk, digest, names it includes). ctime changes with every write, whatever
# happens to mtime, so an edit with a restored mtime is seen too.
_seen: dict[str, tuple[tuple[int, int, int, int], str, tuple[str, ...]]] = {}


def digest_and_includes(path: str) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of a file's bytes and the names it includes, read again only when the file changed."""
    status = os.stat(path)
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = _seen.get(path)
    if known is not None and known[0] == stamp:
        return known[1], known[2]
    with open(path, "rb") as file:
        text = file.read()
    includes = tuple(os.fsdecode(name) for name in _INCLUDE.findall(text.replace(b"\\\n", b"")))
    result = hashlib.sha256(text).hexdigest(), includes
    _seen[path] = (stamp, *result)
    return result


def closure(sources: Iterable[str], include_dirs: Sequence[str]) -> dict[str, str]:
    """Every own file reachable from ``sources`` -> its digest.

    A name is looked up as a compiler does: beside the file that includes it, then in ``include_dirs`` in order.
    A name found nowhere belongs to the system, to CUDA or to torch, which the toolchain's versions stand for.
    """
    digests: dict[str, str] = {}
    todo = list(sources)
    while todo:
        path = todo.pop()
        if path in digests:
            continue
        digests[path], names = digest_and_includes(path)
        for name in names:
            for directory in (os.path.dirname(path), *include_dirs):
                found = os.path.normpath(f"{directory}/{name}")
                if found in digests or os.path.isfile(found):
                    todo.append(found)
                    break
    return digests
