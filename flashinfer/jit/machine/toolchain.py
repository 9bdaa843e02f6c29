"""Lookup of build tools and of their versions. No compiler runs twice for one answer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ... import env
from ...errors import ToolchainError
from . import trust
from .identity import Identity, identity_of


@dataclass(frozen=True)
class Toolchain:
    """The tools of one backend. Only their versions enter a key, not paths and launchers."""

    cxx: str
    nvcc: str | None
    ninja: str
    torch_dir: Path
    cxx_launcher: tuple[str, ...] = ()
    nvcc_launcher: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        """Return the properties of the tools that change an artifact's bytes: versions, never paths."""
        return identity_of(self.cxx, self.nvcc)


def find_toolchain(backend: str) -> Toolchain:
    """Return the tools that build modules of ``backend``.

    Raises:
        ToolchainError: a tool is missing. The text says where it was searched and what to install.
    """
    return Toolchain(
        cxx=find_cxx(),
        nvcc=find_nvcc() if backend == "cuda" else None,
        ninja=find_ninja(),
        torch_dir=find_torch(),
        cxx_launcher=_launcher(env.CXX_LAUNCHER),
        nvcc_launcher=_launcher(env.NVCC_LAUNCHER) if backend == "cuda" else (),
    )


def toolchain_identity(backend: str, writes: bool = True) -> Identity:
    """Return the identity of the tools of a build here, without a search for tools that change no bytes."""
    return identity_of(find_cxx(), find_nvcc() if backend == "cuda" else None, writes)


def find_cxx() -> str:
    """Return the C++ compiler: ``CXX``, else ``g++``, else ``c++`` on ``PATH``."""
    asked = env.CXX.get()
    if asked and " " in asked and not Path(asked).exists():
        raise ToolchainError(
            f"CXX={asked!r}: wanted one program; a launcher such as ccache goes into FLASHINFER_CXX_LAUNCHER"
        )
    install = "g++ 11 or newer (Debian, Ubuntu: apt install g++)"
    return _find("a C++ compiler", "CXX", asked, _on_path("g++", "c++"), install)


def find_nvcc() -> str:
    """Return nvcc: ``FLASHINFER_NVCC``, ``CUDA_HOME``, ``PATH``, the pip package, the usual directory."""
    asked, home = env.NVCC.get(), env.CUDA_HOME.get()
    if asked is None and home is not None:
        return _find("nvcc", "CUDA_HOME", str(home / "bin" / "nvcc"), (), "a CUDA toolkit there")
    where = (*_on_path("nvcc"), *_in_pip_packages("nvcc"), "/usr/local/cuda/bin/nvcc")
    install = "the CUDA toolkit 12.4 or newer, or: pip install nvidia-cuda-nvcc"
    return _find("nvcc", "FLASHINFER_NVCC", asked, where, install)


def find_ninja() -> str:
    """Return ninja of this interpreter's environment (``PATH`` need not have it), else ninja on ``PATH``."""
    where = (*(os.path.join(folder, "ninja") for folder in _interpreter_folders()), *_on_path("ninja"))
    return _find("ninja", "", None, where, "ninja (pip install ninja)")


def _interpreter_folders() -> list[str]:
    folders = [os.path.dirname(sys.executable or ""), sysconfig.get_path("scripts")]
    return list(dict.fromkeys(filter(None, folders)))


def find_python() -> str:
    """Return the Python for child processes: this one, or a similar one if another program embeds this one.

    The same version comes first, because the modules that a child imports are compiled for it.

    Raises:
        ToolchainError: no Python was found.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.exec_prefix, sys.base_exec_prefix)]
    beside = [os.path.join(folder, one) for folder in dict.fromkeys(folders) for one in (name, "python3")]
    # In a program that embeds Python, sys.executable may be that program, which would then run itself.
    mine = (
        [sys.executable]
        if re.fullmatch(r"\.?python[\d.]*[a-z]?(-(dbg|wrapped))?", os.path.basename(sys.executable or ""))
        else []
    )
    return _find("python", "", None, (*mine, *beside, *_on_path(name, "python3")), f"{name}, in PATH")


@cache
def find_torch() -> Path:
    """Return the directory of the torch package without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError("torch is not installed, and compiling needs its headers: pip install 'torch>=2.10'")
    return Path(spec.origin).parent


def _launcher(variable: env.Variable[tuple[str, ...]]) -> tuple[str, ...]:
    program, *arguments = variable.get() or ("",)
    return (_find("", variable.name, program, (), "it"), *arguments) if program else ()


def _on_path(*names: str) -> Iterator[str]:
    return (found for name in names if (found := shutil.which(name)))


def _in_pip_packages(name: str) -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from (str(path) for path in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True))


def _find(what: str, variable: str, asked: str | None, where: Iterable[str], install: str) -> str:
    if asked is not None:
        found = shutil.which(asked)
        if found is None:
            raise ToolchainError(f"{variable}: {asked!r} is not a program that runs; unset it or install {install}")
        return _trusted(found, f"{variable}: ")
    looked = list(where)
    if (path := next(filter(shutil.which, looked), None)) is not None:
        return _trusted(path)
    searched = f"PATH={os.environ.get('PATH', '')}" + "".join(f", {path}" for path in looked)
    hint = f" or set {variable}" if variable else ""
    raise ToolchainError(f"cannot find {what}: looked in {searched}; install {install}{hint}")


def _trusted(program: str, named_by: str = "") -> str:
    """Return a program if nobody else can replace or change it.

    The rule is the same for every source of the path.
    """
    real = os.path.realpath(program)
    folders = [os.path.dirname(real), os.path.dirname(os.path.abspath(program))]
    refusal = next(filter(None, map(trust.refusal, dict.fromkeys([real, *folders]))), None)
    # Write access next to the interpreter runs code here anyway. sysconfig takes milliseconds, so it is asked
    # last.
    if refusal is not None and (named_by or folders[-1] not in _interpreter_folders()):
        raise ToolchainError(f"{named_by}{program!r} is not run: {refusal}")
    return program
