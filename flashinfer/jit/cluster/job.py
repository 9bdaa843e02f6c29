"""Messages between client and workers: plain values, and files by their digest.

A path is valid on one machine only. The sender therefore replaces each path in a text by a mark, such as ``<root>``,
and the receiver replaces the mark by its own path.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ... import env
from ...errors import ClusterError, ToolchainError
from ..lookup import BuildRequest
from ..machine.toolchain import Toolchain, find_toolchain
from ..spec import closure, digest
from ..specjson import to_json

PROTOCOL = 1  # increase it when a message changes its meaning
Tools = dict[str, str | None]


class _Call:
    """A call that runs when it is unpickled."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def dask_task(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[[bytes], Any], bytes]:
    """Return a Dask task for a call. The scheduler unpickles tasks and must not need this package."""
    return pickle.loads, pickle.dumps(_Call(function, arguments))


class Job:
    """Message that describes one module to a worker, and the marks for paths of this machine.

    ``tree`` maps the module's files in the project to their digests, ``own`` maps the user's files. ``contents`` maps
    the digests of both to bytes.
    """

    def __init__(self, request: BuildRequest) -> None:
        spec, root = request.spec, env.data_root() + os.sep
        plain = to_json(spec)
        self.request, self.plain = request, plain
        self.fields, self.contents = spec.fields(), dict[str, bytes]()
        if digest(self.fields) != request.key:
            raise ClusterError(f"a source or header of {spec.name!r} has changed during this command: run it again")
        self.own = {
            name: self._add_content(text.encode("utf-8", "surrogateescape")) for name, text in plain.pop("own").items()
        }
        reached = sorted(map(os.path.normpath, closure(spec.scan_roots(), spec.include_dirs)))
        self.tree = {path[len(root) :]: self._read(path) for path in reached if path.startswith(root)}
        marks = [*plain["sources"], *plain["headers"], *plain["include_paths"]]
        paths = [*spec.sources, *spec.headers, *spec.include_paths]
        own_folders = (
            path.removesuffix(mark.removeprefix("<own>"))
            for mark, path in zip(marks, paths, strict=True)
            if mark.startswith("<own>/")
        )
        self.paths = {"<root>": env.data_root(), "<own>": next(own_folders, ""), **tool_paths(request.toolchain)}

    def _read(self, path: str) -> str:
        with open(path, "rb") as file:
            return self._add_content(file.read())

    def _add_content(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.contents[name] = data
        return name

    def message(self, tree: str, jobs: int | None) -> dict[str, Any]:
        """Return the message for a worker that has stored the files, as the tree with the digest ``tree``."""
        request = self.request
        wanted = {"key": request.key, "build_key": request.build_key, "archs": request.target.archs}
        return {"spec": self.plain, "own": self.own, "tree": tree, "jobs": jobs, **wanted}


def tool_paths(toolchain: Toolchain) -> dict[str, str]:
    """Map the marks of tools that a message may contain to their paths on this machine."""
    return {"<cxx>": toolchain.cxx, "<nvcc>": toolchain.nvcc or "", "<torch>": str(toolchain.torch_dir)}


def mark_paths(text: str, paths: Mapping[str, str]) -> str:
    """Replace paths of this machine by marks. The longest path is first, because one may be a prefix of another."""
    for mark, path in sorted(paths.items(), key=lambda item: -len(item[1])):
        text = text.replace(path, mark) if path else text
    return text


def restore_paths(text: str, paths: Mapping[str, str]) -> str:
    """Replace the marks in a text of another machine by paths of this machine."""
    for mark, path in paths.items():
        text = text.replace(mark, path) if path else text
    return text


def tools_of(backend: str) -> Tools | str:
    """Return the properties of this machine's tools that change a module's bytes, or an error text if a tool is missing.

    They include torch's version, because a module is compiled with its headers. The local part of the version is
    removed: it names only a CUDA release.
    """
    try:
        return {**find_toolchain(backend).identity, "torch": version("torch").split("+")[0]}
    except (ToolchainError, PackageNotFoundError) as err:
        return str(err)


def describe(tools: Tools | str) -> str:
    """Return tools as text for messages."""
    if isinstance(tools, str):
        return tools
    return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in tools.items())
