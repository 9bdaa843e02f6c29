"""Conversion of a spec to plain JSON values and back.

Paths below the data root are written relative to it. The user's files are included by content, relative to
their common folder, so that their relative paths and the spec's key stay the same.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .. import env
from .machine.workspace import write_atomically
from .spec import Spec, closure, digest

S = TypeVar("S", bound=Spec)
LARGEST = 32 << 20  # bytes of the user's files in one spec: more is a toolkit, not a variant
_ROOT, _CUSTOM = "<root>/", "<own>/"


def to_json(spec: Spec) -> dict[str, Any]:
    """Return a spec as plain JSON values, with the contents of every file that is not the project's.

    Raises:
        ValueError: the user's files take more than 32 MiB.
        OSError: a file cannot be read.
    """
    root = env.data_root() + os.sep
    reached = {os.path.normpath(path) for path in closure(spec.scan_roots(), spec.include_dirs)}
    linked = {flag for flag in spec.ldflags if os.path.isabs(flag) and os.path.isfile(flag)}
    custom = sorted(path for path in reached | set(map(os.path.normpath, linked)) if not path.startswith(root))
    folders = [path for path in spec.include_paths if not path.startswith(root)]
    base = os.path.commonpath([*map(os.path.dirname, custom), *folders]) + os.sep if custom or folders else root
    if sum(os.path.getsize(path) for path in custom) > LARGEST:
        raise ValueError(f"files of {spec.name!r} outside of {root}: got more than {LARGEST >> 20} MiB, wanted less")

    def relative(path: str) -> str:
        if not os.path.isabs(path):
            return path
        known = path.startswith(root)
        return (_ROOT if known else _CUSTOM) + os.path.relpath(path, root if known else base)

    names = {path: os.path.relpath(path, base) for path in custom}
    # surrogateescape preserves any bytes, and text stays text.
    contents = {names[path]: Path(path).read_bytes().decode("utf-8", "surrogateescape") for path in custom}
    plain: dict[str, Any] = json.loads(json.dumps({one.name: getattr(spec, one.name) for one in fields(spec)}))
    for name in ("sources", "include_paths", "headers"):
        plain[name] = [relative(path) for path in plain[name]]
    plain["ldflags"] = [relative(flag) if flag in linked else flag for flag in plain["ldflags"]]
    plain["source_cflags"] = [[relative(path), flag] for path, flag in plain["source_cflags"]]
    for name in ("cflags", "cuda_cflags"):
        plain[name] = [flag.replace(env.data_root(), "<root>") for flag in plain[name]]
    return {**plain, "own": contents}


def from_json(kind: type[S], value: Any, folder: Path) -> S:
    """Return the spec that :func:`to_json` wrote, as ``kind``. The user's files are written below ``folder``.

    Raises:
        ValueError: the value is not such a spec, or a file leads out of the folder.
    """
    kinds = {one.name: get_type_hints(Spec)[one.name] for one in fields(Spec)}
    if not isinstance(value, dict) or value.keys() != {*kinds, "own"}:
        raise ValueError(f"spec: got {sorted(value) if isinstance(value, dict) else value!r}, wanted {sorted(kinds)}")
    values = {name: _tuples(value[name]) for name in kinds}
    for name, wanted in kinds.items():
        if not _fits(values[name], wanted):
            raise ValueError(f"spec: {name}: got {value[name]!r}, wanted {wanted}")
    custom = value["own"]
    if not isinstance(custom, dict) or not all(isinstance(text, str) for text in custom.values()):
        raise ValueError("spec: own: wanted the text of every file")
    home = f"{folder}/{digest(custom)[:32]}"
    for name in ("sources", "include_paths", "headers"):
        values[name] = tuple(_absolute(path, home) for path in values[name])
    marked = {flag: _absolute(flag, home) for flag in values["ldflags"] if flag.startswith((_ROOT, _CUSTOM))}
    values["ldflags"] = tuple(marked.get(flag, flag) for flag in values["ldflags"])
    values["source_cflags"] = tuple((_absolute(path, home), flag) for path, flag in values["source_cflags"])
    for name in ("cflags", "cuda_cflags"):
        values[name] = tuple(flag.replace("<root>", env.data_root()) for flag in values[name])
    spec, contents = kind(**values), {_absolute(_CUSTOM + name, home): text for name, text in custom.items()}
    for path, text in contents.items():
        data = text.encode("utf-8", "surrogateescape")
        if not os.path.isfile(path) or Path(path).read_bytes() != data:
            write_atomically(Path(path), data)
    if custom:
        os.utime(home)  # in use: see gc
    return spec


def _absolute(path: str, home: str) -> str:
    """Return the path here for a recorded one.

    Without a mark it is relative to the data root, as in every spec.
    """
    mark, root = next(((m, r) for m, r in ((_ROOT, env.data_root()), (_CUSTOM, home)) if path.startswith(m)), ("", ""))
    rest = path[len(mark) :]
    if os.path.isabs(rest) or os.path.normpath(rest).split(os.sep)[0] == "..":
        raise ValueError(f"spec: got the path {path!r}, wanted one that stays in its folder")
    return os.path.normpath(os.path.join(root, rest))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a type made of tuples, unions and plain classes."""
    of = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = (of[0],) * len(value) if isinstance(value, tuple) and of[-1] is Ellipsis else of
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    return any(_fits(value, one) for one in of) if of else type(value) is kind
