"""``compile-commands``: the commands of a build in the form that clangd reads.

They come from the files that a build would run, through ``ninja -t compdb``. A header gets the command of the
first source that reaches it. Commands of nvcc are translated to clang. Configuration headers are rendered
into ``<workspace>/build/ide``, where the commands look for them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ToolchainError
from ..jit.machine.target import Target, native_level, wanted_target
from ..jit.machine.toolchain import Toolchain, compiler_environment, find_toolchain
from ..jit.machine.workspace import workspace, write_atomically
from ..jit.module import JitSpec
from ..jit.modules import Matrix, matrix_specs
from ..jit.ninja import render_config, render_graph, render_spec
from ..jit.report import write
from ..jit.spec import BACKENDS, closure
from .table import show
from .usage import Add, json_option

_DEFAULT_ARCH = "9.0a"  # without a GPU and a named arch: supports everything that the kernels use
# nvcc's options that clang does not have -> their number of words.
_DROP = {"-objtemp": 1, "-MMD": 1, "-MF": 2, "-ccbin": 2, "-c": 1, "-o": 2}


HELP = "Write compile_commands.json, for clangd and other tools of an IDE."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("--output", type=Path, metavar="FILE", help="by default compile_commands.json in the checkout")


def run(options: argparse.Namespace) -> int:
    """Write the file and print its entries."""
    output: Path = options.output or Path(env.data_root()) / "compile_commands.json"
    folder = workspace() / "build" / "ide"
    entries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for backend in BACKENDS:
        try:
            toolchain = find_toolchain(backend)
        except ToolchainError as err:
            write(f"note: {backend} sources are left out: {err}\n")
            continue
        specs = matrix_specs(Matrix(backends=(backend,)))
        commands = _commands(folder, specs, _target(backend), toolchain)
        entries += commands
        rows += [{"file": entry["file"], "backend": backend} for entry in commands]
    entries += _header_entries(entries)
    write_atomically(output, json.dumps(entries, indent=1).encode())
    output.chmod(0o644)
    show(rows, options.json)
    write(f"{output}: {len(entries)} files\n")
    return 0


def _target(backend: str) -> Target:
    try:
        if backend == "cpu":
            return Target("cpu", (native_level(),), True)
        return Target("cuda", wanted_target("cuda").archs[-1:], True)  # clang parses for one arch
    except ToolchainError:
        return Target("cuda", (_DEFAULT_ARCH,), True)


def _commands(folder: Path, specs: list[JitSpec], target: Target, toolchain: Toolchain) -> list[dict[str, Any]]:
    for spec in specs:
        one = Target(spec.backend, spec.archs[-1:], True) if spec.archs else target
        write_atomically(folder / spec.name / "build.ninja", os.fsencode(render_spec(spec, one, spec.name)))
        if spec.template:
            write_atomically(folder / spec.name / spec.config_header, render_config(spec).encode())
    graph = f"{target.backend}.ninja"
    write_atomically(folder / graph, os.fsencode(render_graph({spec.name: spec for spec in specs}, toolchain)))
    rules = ["cxx", *(["nvcc"] if toolchain.nvcc else [])]
    command = [toolchain.ninja, "-C", str(folder), "-f", graph, "-t", "compdb", *rules]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    cuda = _toolkit(toolchain.nvcc) if toolchain.nvcc else ""
    stubs = _stubs(folder, cuda) if cuda else []
    entries = []
    for entry in json.loads(text[text.index("[") :]):
        words = shlex.split(entry["command"])
        launcher = toolchain.nvcc_launcher if toolchain.nvcc in words else toolchain.cxx_launcher
        words = words[len(launcher) :]
        if words[0] == toolchain.nvcc:
            words = to_clang(words, cuda)
            words[1:1] = stubs
        entries.append({"directory": entry["directory"], "file": entry["file"], "arguments": words})
    return entries


def _toolkit(nvcc: str) -> str:
    """Return the toolkit's directory as nvcc names it, because the program on ``PATH`` may be a script."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", "none.o"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=compiler_environment()).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return os.path.normpath(top[1]) if top else str(Path(nvcc).resolve().parent.parent)


def _stubs(folder: Path, cuda: str) -> list[str]:
    """Return flags for an empty cuRAND header if the toolkit has none. Clang always includes it."""
    name = "curand_mtgp32_kernel.h"
    if os.path.exists(f"{cuda}/include/{name}"):
        return []
    write_atomically(folder / "stubs" / name, b"#pragma once\n")
    return ["-isystem", str(folder / "stubs")]


def to_clang(words: list[str], cuda: str) -> list[str]:
    """Translate an nvcc command that compiles one file to clang. ``cuda`` is the toolkit's directory."""
    result = ["clang++", "-x", "cuda", f"--cuda-path={cuda}", "-Wno-unknown-cuda-version"]
    rest = iter(words[1:])
    for word in rest:
        if word in _DROP:
            for _ in range(_DROP[word] - 1):
                next(rest)
        elif word.startswith("-gencode="):
            arch = re.search(r"code=(sm_\w+)", word)
            result += [f"--cuda-gpu-arch={arch[1]}"] if arch else []
        elif word.startswith("-Xcompiler="):
            result += word.removeprefix("-Xcompiler=").split(",")
        elif word != "-G" and not word.startswith("-Xcudafe="):
            result.append(word)
    return result


def _header_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry per own header: the command of a kernel that reaches it, else that of any source."""
    root = env.data_root()
    headers: dict[str, dict[str, Any]] = {}
    # Kernels come before bindings: bindings see torch, but common headers must be parsed as kernels see them.
    for entry in sorted(entries, key=lambda entry: not re.search(r"_(cpu|cuda)\.\w+$", entry["file"])):
        for path in closure([entry["file"]], [f"{root}/include", f"{root}/csrc"]):
            if str(path) == entry["file"] or str(path) in headers:
                continue
            words = list(entry["arguments"])
            if "cuda" not in words:
                words[1:1] = ["-x", "c++-header"]
            words = [str(path) if word == entry["file"] else word for word in words]
            headers[str(path)] = {"directory": entry["directory"], "file": str(path), "arguments": words}
    return [headers[path] for path in sorted(headers)]
