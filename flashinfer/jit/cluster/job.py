"""What travels between client and workers: plain values, and files by their digest.

A path means something on one machine alone: where text with paths travels, a mark stands for each, and the other side
puts its own there.
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
from ..closure import closure
from ..machine.toolchain import Toolchain, find_toolchain
from ..run import Request
from ..spec import digest
from ..specjson import to_json

PROTOCOL = 1  # raise it when what travels changes its meaning
Tools = dict[str, str | bool | None]


class _Call:
    """A call that is made by unpickling it."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def packed(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[[bytes], Any], bytes]:
    """Return a task of Dask's that makes a call: a scheduler unpickles tasks, and need not have this package for it."""
    return pickle.loads, pickle.dumps(_Call(function, arguments))


class Job:
    """One module as a worker gets it, and what of this machine its marks stand for.

    ``tree``: every file of the project's that the module is made of -> digest; ``own``: those of the user's;
    ``contents`` of both by digest.
    """

    def __init__(self, request: Request) -> None:
        spec, root = request.spec, env.data_root() + os.sep
        plain = to_json(spec)
        self.request, self.plain, self.fields, self.contents = request, plain, spec.fields(), dict[str, bytes]()
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
        self.places = {"<root>": env.data_root(), "<own>": next(homes, ""), **places(request.toolchain)}

    def _read(self, path: str) -> str:
        with open(path, "rb") as file:
            return self._keep(file.read())

    def _keep(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.contents[name] = data
        return name

    def message(self, tree: str, jobs: int | None) -> dict[str, Any]:
        """What is sent to a worker that has the files, those of the project's in the tree of that digest."""
        request = self.request
        wanted = {"key": request.key, "build_key": request.build_key, "archs": request.target.archs}
        return {"spec": self.plain, "own": self.own, "tree": tree, "jobs": jobs, **wanted}


def places(toolchain: Toolchain) -> dict[str, str]:
    """The paths of the tools that a message may name."""
    return {"<cxx>": toolchain.cxx, "<nvcc>": toolchain.nvcc or "", "<torch>": str(toolchain.torch_dir)}


def marked(text: str, here: Mapping[str, str]) -> str:
    """A text with marks for the paths of this machine, the longest first: one may lie in another."""
    for mark, path in sorted(here.items(), key=lambda item: -len(item[1])):
        text = text.replace(path, mark) if path else text
    return text


def unmarked(text: str, here: Mapping[str, str]) -> str:
    """A text of another machine with the paths of this one."""
    for mark, path in here.items():
        text = text.replace(mark, path) if path else text
    return text


def tools_of(backend: str) -> Tools | str:
    """What of this machine's tools changes a byte of a module, or why it cannot build any.

    A module runs with every torch, but it is made of the headers of one: its version, less what that was built for.
    """
    try:
        return {**find_toolchain(backend).identity, "torch": version("torch").split("+")[0]}
    except (ToolchainError, PackageNotFoundError) as err:
        return str(err)


def described(tools: Tools | str) -> str:
    """Tools as a person reads them."""
    if isinstance(tools, str):
        return tools
    return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in tools.items())
