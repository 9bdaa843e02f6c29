"""Messages between client and workers: plain values, and files by their digest.

A path is valid on one machine only. Text that travels has a mark for each path, and the receiver
substitutes its own paths.
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
Tools = dict[str, str | bool | None]


class _Call:
    """A call that runs when it is unpickled."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def packed(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[[bytes], Any], bytes]:
    """Return a Dask task for a call. The scheduler unpickles tasks and must not need this package."""
    return pickle.loads, pickle.dumps(_Call(function, arguments))


class Job:
    """Message that describes one module to a worker, and the marks that replace paths of this machine.

    ``tree`` maps the module's files of the project to their digests, ``own`` those of the user.
    ``contents`` has the bytes of both by digest.
    """

    def __init__(self, request: BuildRequest) -> None:
        spec, root = request.spec, env.data_root() + os.sep
        plain = to_json(spec)
        self.request, self.plain = request, plain
        self.fields, self.contents = spec.fields(), dict[str, bytes]()
        if digest(self.fields) != request.key:
            raise ClusterError(f"a source or header of {spec.name!r} has just changed: start again")
        self.own = {
            name: self._keep(text.encode("utf-8", "surrogateescape")) for name, text in plain.pop("own").items()
        }
        reached = sorted(map(os.path.normpath, closure(spec.roots(), spec.include_dirs)))
        self.tree = {path[len(root) :]: self._read(path) for path in reached if path.startswith(root)}
        marks = [*plain["sources"], *plain["headers"], *plain["include_paths"]]
        paths = [*spec.sources, *spec.headers, *spec.include_paths]
        homes = (
            path.removesuffix(mark.removeprefix("<own>"))
            for mark, path in zip(marks, paths, strict=True)
            if mark.startswith("<own>/")
        )
        self.places = {"<root>": env.data_root(), "<own>": next(homes, ""), **tool_paths(request.toolchain)}

    def _read(self, path: str) -> str:
        with open(path, "rb") as file:
            return self._keep(file.read())

    def _keep(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.contents[name] = data
        return name

    def message(self, tree: str, jobs: int | None) -> dict[str, Any]:
        """Return the message for a worker that already has the files, laid out as the tree of that digest."""
        request = self.request
        wanted = {"key": request.key, "build_key": request.build_key, "archs": request.target.archs}
        return {"spec": self.plain, "own": self.own, "tree": tree, "jobs": jobs, **wanted}


def tool_paths(toolchain: Toolchain) -> dict[str, str]:
    """Return the marks -> the paths of the tools that a message may name."""
    return {"<cxx>": toolchain.cxx, "<nvcc>": toolchain.nvcc or "", "<torch>": str(toolchain.torch_dir)}


def marked(text: str, here: Mapping[str, str]) -> str:
    """Replace paths of this machine by marks, the longest path first, because one may lie in another."""
    for mark, path in sorted(here.items(), key=lambda item: -len(item[1])):
        text = text.replace(path, mark) if path else text
    return text


def unmarked(text: str, here: Mapping[str, str]) -> str:
    """Replace the marks in a text of another machine by paths of this one."""
    for mark, path in here.items():
        text = text.replace(mark, path) if path else text
    return text


def tools_of(backend: str) -> Tools | str:
    """Return the properties of this machine's tools that change a module's bytes, or why it cannot build one.

    A module runs with every torch but is compiled with the headers of one. The version counts without its
    local part, which names only a CUDA release.
    """
    try:
        return {**find_toolchain(backend).identity, "torch": version("torch").split("+")[0]}
    except (ToolchainError, PackageNotFoundError) as err:
        return str(err)


def described(tools: Tools | str) -> str:
    """Format tools for a reader."""
    if isinstance(tools, str):
        return tools
    return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in tools.items())
