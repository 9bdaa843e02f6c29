"""``Spec``: the complete description of a module, and the digests of its files.

A spec is a value, made without a compiler, a GPU or a disk write. Its ``key`` hashes an injective encoding of
all inputs that change a byte of the artifact, see ``fields``, except those of a machine: the target (CPU level, GPU
archs) and the tools. ``artifact.build_key`` adds these.

The key covers the contents of a module's sources, and of all headers of the library and of the user that they include.
The scan for includes ignores conditionals, and does not find an include whose name is a macro. After the build, the
compiler's dependency output is compared with the scan, see ``build.check_dependencies``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from .. import env

S = TypeVar("S", bound="Spec")
Scalar = str | int | bool
Value = str | int  # of an axis of coverage. All values of one axis have one type.
TORCH_ABI = (2, 10)  # the oldest torch that a module runs with, see csrc/binding/binding.h
FORMAT = 5  # of the key and of the manifest: increase it when either changes its meaning
BACKENDS = ("cpu", "cuda")
DTYPES = ("float32", "float16", "bfloat16")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


@dataclass(frozen=True)
class Spec:
    """Description of one module. ``JitSpec`` adds methods that build and load it, see ``module.py``.

    ``config`` contains constants. ``coverage`` maps axes to values (``{"dtype": ("float16", "bfloat16")}``). A call of
    the module selects one value of each axis. ``template`` renders both into ``config_header``. ``namespace`` is the
    ``torch.ops`` namespace of the module's operators.
    """

    name: str
    backend: str
    sources: tuple[str, ...]
    namespace: str
    config: tuple[tuple[str, Scalar], ...] = ()
    coverage: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    template: str = ""
    config_header: str = ""
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()  # files that only the rendered header includes
    source_cflags: tuple[tuple[str, str], ...] = ()  # source -> one more flag for it only
    split: bool = False  # the last source is compiled once per combination of coverage's values, see units()
    dispatching: str = ""  # a module of several configurations that may replace this one
    archs: tuple[str, ...] = ()  # the only archs of the kernels ("9.0a"), or empty for any

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: got {self.name!r}, wanted letters, digits and any of _ . + - (at most 128)")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: got {self.backend!r}, wanted one of {', '.join(BACKENDS)}")
        if not self.sources:
            raise ValueError(f"sources of {self.name!r}: got none, wanted at least one file")
        if self.archs and self.backend != "cuda":
            raise ValueError(f"archs of {self.name!r}: got {' '.join(self.archs)} for {self.backend}, wanted none")
        if self.archs and self.archs != env.parse_cuda_archs(" ".join(self.archs)):
            raise ValueError(f"archs of {self.name!r}: got {self.archs}, wanted GPU archs, sorted, each once")
        stems = [PurePath(unit).stem for unit in self.units()]
        if len(set(stems)) != len(stems):
            raise ValueError(f"sources of {self.name!r}: got two files with one stem in {stems}, wanted distinct stems")
        flags = (*self.cflags, *self.cuda_cflags, *self.ldflags, self.namespace)
        for flag in (*flags, *self.include_paths, *self.sources):
            if "\n" in flag or "\0" in flag:
                raise ValueError(f"flags and paths of {self.name!r}: got a newline or NUL in {flag!r}, wanted none")

    @property
    def include_dirs(self) -> tuple[str, ...]:
        root = env.data_root()
        project = (f"{root}/include", f"{root}/csrc")
        # Sources of the project include the project's headers first, even if a folder of the user has equal names.
        is_user_source = os.path.isabs(self.sources[0])
        return (*self.include_paths, *project) if is_user_source else (*project, *self.include_paths)

    def source_paths(self) -> tuple[str, ...]:
        """Return the sources as absolute paths.

        Names without a leading ``/`` are relative to the data root.
        """
        return tuple(os.path.join(env.data_root(), source) for source in self.sources)

    def units(self) -> dict[str, tuple[str, ...]]:
        """Map the name of each compile unit to its source's path and its flags.

        A unit is a source, or a part of a ``split`` source. Part ``n`` has ``FLASHINFER_PART`` defined as ``n``.
        """
        flags, parts = dict(self.source_cflags), math.prod(len(values) for _, values in self.coverage)
        units = dict[str, tuple[str, ...]]()
        for source, path in zip(self.sources, self.source_paths(), strict=True):
            unit = (path, *([flags[source]] if source in flags else []))
            if not self.split or parts == 1 or source != self.sources[-1]:
                units[source] = unit
                continue
            for part in range(parts):
                name = PurePath(source).with_stem(f"{PurePath(source).stem}.{part}")
                units[str(name)] = (*unit, f"-DFLASHINFER_PART={part}")
        return units

    def folders(self) -> dict[str, str]:
        """Map the folders of the module's files, with a trailing slash, to names equal on every machine.

        The name of the project's folder is empty. A file is named by the first folder that contains it.
        """
        folders = {f"{env.data_root()}/": ""}
        of_sources = map(os.path.dirname, self.source_paths())
        for number, folder in enumerate((*of_sources, *self.include_paths)):
            folders.setdefault(f"{folder}/", f"<{number}>/")
        return folders

    def files(self) -> dict[str, str]:
        """Map the name of every file of the module, equal on every machine, to its SHA-256."""
        sources, folders = self.source_paths(), self.folders()
        named = {}
        for path, content in closure(self.scan_roots(), self.include_dirs).items():
            folder = next((one for one in folders if path.startswith(one)), None)
            name = os.path.relpath(path, os.path.dirname(sources[0])) if folder is None else path[len(folder) :]
            named[("<outside>/" if folder is None else folders[folder]) + name] = content
        return named | {f"<linked>/{number}": digest_and_includes(flag)[0] for number, flag in self._linked().items()}

    def _linked(self) -> dict[int, str]:
        """Return the files that linker flags name, such as an archive. The key covers their contents."""
        return {n: flag for n, flag in enumerate(self.ldflags) if os.path.isabs(flag) and os.path.isfile(flag)}

    def scan_roots(self) -> tuple[str, ...]:
        """Return the files from which the scan of includes starts: sources, the template and further headers."""
        template = (f"{env.data_root()}/{self.template}",) if self.template else ()
        return (*self.source_paths(), *template, *self.headers)

    def fields(self) -> dict[str, Any]:
        """Return the parts of the key as plain JSON values. A manifest records them too."""
        root, linked = env.data_root(), self._linked()
        return {
            "format": FORMAT,
            "name": self.name,
            "backend": self.backend,
            "namespace": self.namespace,
            "sources": [source if not os.path.isabs(source) else Path(source).name for source in self.sources],
            "config": [list(item) for item in self.config],
            "coverage": {axis: list(values) for axis, values in self.coverage},
            "config_header": self.config_header,
            "cflags": [flag.replace(root, "<root>") for flag in self.cflags],
            "cuda_cflags": [flag.replace(root, "<root>") for flag in self.cuda_cflags],
            "ldflags": [f"<linked>/{n}" if n in linked else flag for n, flag in enumerate(self.ldflags)],
            "source_cflags": [list(item) for item in self.source_cflags],
            "split": self.split,
            "only_archs": list(self.archs),
            "torch_abi": list(TORCH_ABI),
            "files": self.files(),
        }

    @property
    def key(self) -> str:
        """Return the hex digest of :meth:`fields`. Equal keys mean equal sources, configuration and flags."""
        return digest(self.fields())

    def covering(self: S, coverage: Mapping[str, Iterable[Value]]) -> S:
        """Return this spec with another coverage."""
        return replace(self, coverage=checked_coverage(coverage))


def digest(value: Any) -> str:
    """Return the SHA-256 of the sorted JSON encoding of a plain value, which is injective."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checked_coverage(coverage: Mapping[str, Iterable[Value]]) -> tuple[tuple[str, tuple[Value, ...]], ...]:
    """Return a spec's coverage in sorted order. Specs with the same values in another order are then equal."""
    result = []
    for axis, unsorted in sorted(coverage.items()):
        values = set(unsorted)
        if not values:
            raise ValueError(f"{axis}: got no value, wanted at least one")
        if {type(value) for value in values} not in ({str}, {int}):
            raise ValueError(f"{axis}: got {sorted(map(repr, values))}, wanted only strings or only integers")
        result.append((axis, tuple(sorted(values))))
    return tuple(result)


# The pattern is not anchored: an include in a comment counts too, and the search jumps from # to #.
_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*([<"][^>"\n]+)[>"]')

# path -> (identity of the file on disk, digest, includes). ctime changes with every write and cannot be restored, so
# an edit with a restored mtime is noticed. Clocks of file systems tick in milliseconds or seconds. A digest is therefore
# cached only if the file's last change is 2 s old: a later edit within the same tick would not change its ctime.
_SETTLED = 2e9  # nanoseconds
_digest_cache: dict[str, tuple[tuple[int, int, int, int], str, tuple[str, ...]]] = {}


def digest_and_includes(path: str) -> tuple[str, tuple[str, ...]]:
    """Return a file's SHA-256 and its includes (``<name`` or ``"name``). Unchanged files are not read again."""
    known = _digest_cache.get(path)
    if known is not None and known[0] == _stamp(os.stat(path)):
        return known[1], known[2]
    now = time.time_ns()
    status, text = _read(path)
    joined = text.replace(b"\\\n", b"") if b"\\" in text else text
    includes = tuple(os.fsdecode(name) for name in _INCLUDE.findall(joined))
    result = hashlib.sha256(text).hexdigest(), includes
    if status.st_ctime_ns < now - _SETTLED:
        _digest_cache[path] = (_stamp(status), *result)
    return result


def _read(path: str) -> tuple[os.stat_result, bytes]:
    """Return a file's status before it is read, and its bytes."""
    # A warm hit reads about forty files. The system's calls take 0.1 ms less than Python's file objects.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor), b"".join(iter(partial(os.read, descriptor, 1 << 20), b""))
    finally:
        os.close(descriptor)


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def closure(sources: Iterable[str], include_dirs: Sequence[str]) -> dict[str, str]:
    """Map every file of the library or the user that ``sources`` include, also indirectly, to its digest.

    Names are resolved as a compiler does: in quotes next to the including file, then in ``include_dirs`` in order. A
    name that is not found belongs to the system, to CUDA or to torch. The build key contains their versions.
    """
    # Most includes name the same few headers.
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
            if include[0] == '"' and os.path.isfile(sibling := _join(os.path.dirname(path), name)):
                todo.append(sibling)
            elif (found := find(name)) is not None:
                todo.append(found)
    return digests


def _join(directory: str, name: str) -> str:
    path = f"{directory}/{name}"
    return os.path.normpath(path) if "/." in path else path
