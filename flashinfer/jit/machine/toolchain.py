"""Finds the tools of a build and says what they are, without running a compiler twice for one answer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ... import env
from ...errors import ToolchainError
from . import trust
from .workspace import workspace, write_atomically

Identity = dict[str, str | bool | None]


@dataclass(frozen=True)
class Toolchain:
    """The tools for one backend. Paths and launchers steer a build; only their versions enter a key."""

    backend: str
    cxx: str
    nvcc: str | None
    ninja: str
    torch_dir: Path
    cxx_launcher: tuple[str, ...] = ()
    nvcc_launcher: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        """What of the tools changes a byte of the result: versions, never paths."""
        return _identity(self.cxx, self.nvcc, self.torch_dir)

    @property
    def torch_cuda_is_missing(self) -> bool:
        """A CPU build of torch: modules link against a stub that has the soname of libtorch_cuda."""
        return not (self.torch_dir / "lib" / "libtorch_cuda.so").exists()


def find_toolchain(backend: str) -> Toolchain:
    """The tools that modules of ``backend`` are built with.

    Raises:
        ToolchainError: one is missing: what was looked for, where, and what to install.
    """
    return Toolchain(
        backend=backend,
        cxx=find_cxx(),
        nvcc=find_nvcc() if backend == "cuda" else None,
        ninja=find_ninja(),
        torch_dir=find_torch(),
        cxx_launcher=_launcher(env.CXX_LAUNCHER),
        nvcc_launcher=_launcher(env.NVCC_LAUNCHER) if backend == "cuda" else (),
    )


def toolchain_identity(backend: str, writes: bool = True) -> Identity:
    """The identity of the tools that would build here, without looking for those that leave no trace in the result."""
    return _identity(find_cxx(), find_nvcc() if backend == "cuda" else None, find_torch(), writes)


def _identity(cxx: str, nvcc: str | None, torch_dir: Path, writes: bool = True) -> Identity:
    return {
        "cxx": version_of(cxx, writes),
        "nvcc": version_of(nvcc, writes) if nvcc else None,
        "cxx11_abi": cxx11_abi(torch_dir, writes),
    }


def find_cxx() -> str:
    """The C++ compiler: ``CXX``, else ``g++``, else ``c++`` on ``PATH``."""
    asked = env.CXX.get()
    if asked and " " in asked and not Path(asked).exists():
        raise ToolchainError(
            f"CXX={asked!r}: wanted one program; a launcher such as ccache goes into FLASHINFER_CXX_LAUNCHER"
        )
    install = "g++ 11 or newer (Debian, Ubuntu: apt install g++)"
    return _find("a C++ compiler", "CXX", asked, _on_path("g++", "c++"), install)


def find_nvcc() -> str:
    """nvcc: ``FLASHINFER_NVCC``, ``CUDA_HOME``, ``PATH``, the pip package, the usual folder."""
    asked, home = env.NVCC.get(), env.CUDA_HOME.get()
    if asked is None and home is not None:
        return _find("nvcc", "CUDA_HOME", str(home / "bin" / "nvcc"), (), "a CUDA toolkit there")
    where = (*_on_path("nvcc"), *_in_pip_packages("nvcc"), "/usr/local/cuda/bin/nvcc")
    install = "the CUDA toolkit 12.4 or newer, or: pip install nvidia-cuda-nvcc"
    return _find("nvcc", "FLASHINFER_NVCC", asked, where, install)


def find_ninja() -> str:
    """ninja: of the ``ninja`` package beside this interpreter (also when its venv is not on ``PATH``), else ``PATH``."""
    folders = dict.fromkeys([os.path.dirname(sys.executable), sysconfig.get_path("scripts")])
    where = (*(os.path.join(folder, "ninja") for folder in folders), *_on_path("ninja"))
    return _find("ninja", "", None, where, "ninja (pip install ninja)")


def find_python() -> str:
    """A Python for the small program that runs every compiler: this one, unless it is part of another program."""
    mine = (sys.executable, os.path.join(sys.prefix, "bin", "python3"))
    where = (*(path for path in mine if "python" in os.path.basename(path or "")), *_on_path("python3"))
    return _find("python", "", None, where, "python3")


@cache
def find_torch() -> Path:
    """The directory of the torch package, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError(
            "torch is not installed: its headers are needed to compile modules (pip install 'torch>=2.10')"
        )
    return Path(spec.origin).parent


def _launcher(variable: env.Variable[tuple[str, ...]]) -> tuple[str, ...]:
    program, *arguments = variable.get() or ("",)
    return (_find("", variable.name, program, (), "it"), *arguments) if program else ()


def _trusted(variable: str, path: str) -> str:
    """A program that somebody named by its path, if nobody else can have put it there or can change it."""
    real = os.path.realpath(path)
    for place in dict.fromkeys([real, os.path.dirname(real), os.path.dirname(os.path.abspath(path))]):
        if (refusal := trust.refusal(place)) is not None:
            raise ToolchainError(f"{variable}: {path!r} is not run: {refusal}")
    return path


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
            raise ToolchainError(
                f"{variable}: {asked!r} is not a program that can be run; unset it or install {install}"
            )
        return _trusted(variable, found)
    looked = list(where)
    for path in looked:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    places = f"PATH={os.environ.get('PATH', '')}" + "".join(f", {path}" for path in looked)
    hint = f" or set {variable}" if variable else ""
    raise ToolchainError(f"cannot find {what}: looked in {places}; install {install}{hint}")


def version_of(program: str, writes: bool = True) -> str:
    """The version a compiler gives of itself, less its own name: ``g++`` and ``c++`` may be one. It runs once per version."""
    return _remembered(program, "version", lambda: _ask_version(program), writes)


def _ask_version(program: str) -> str:
    command, variables = [program, "--version"], {**os.environ, "LC_ALL": "C"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=variables)
    except (OSError, subprocess.SubprocessError) as err:
        detail = getattr(err, "stderr", "") or str(err)
        raise ToolchainError(f"{' '.join(command)} does not answer: {detail.strip()}") from None
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    release = [line for line in lines if line.startswith("Cuda compilation tools")]
    # nvcc tells its version near the end, g++ and clang++ in the first line behind their name.
    return release[0] if release else re.sub(r"^\S+\s+", "", lines[0]) if lines else "unknown"


def cxx11_abi(torch_dir: Path, writes: bool = True) -> bool:
    """What ``torch.compiled_with_cxx11_abi()`` says, without importing torch: libc10 exports functions of std::string."""
    library = torch_dir / "lib" / "libc10.so"
    mangled = b"__cxx1112basic_string"
    return _remembered(str(library), "cxx11_abi", lambda: str(mangled in library.read_bytes()), writes) == "True"


_answers: dict[tuple[str, str], str] = {}


def _remembered(path: str, question: str, ask: Callable[[], str], writes: bool) -> str:
    try:
        key = (_fingerprint(path), question)
    except OSError:
        return ask()
    if key not in _answers:
        folder = workspace(create=False) / "answers"
        file = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        try:
            (_answers[key],) = json.loads(file.read_bytes())  # cut short, it is no answer
        except (OSError, ValueError, TypeError):
            _answers[key] = ask()
            if writes:
                with suppress(OSError):  # the answer is right all the same; the next process asks again
                    trust.make_directories(folder)
                    write_atomically(file, json.dumps([_answers[key]]).encode())
    return _answers[key]


def _fingerprint(path: str) -> str:
    """What a program is on disk. A script that starts another program stands for that one too."""
    real = os.path.realpath(path)
    status = os.stat(real)
    parts = [f"{real}:{status.st_size}:{status.st_mtime_ns}"]
    if status.st_size < 65536:
        text = Path(real).read_bytes()
        parts.append(hashlib.sha256(text).hexdigest())
        if text.startswith(b"#!"):
            for word in sorted(set(re.findall(rb"/[\w./+-]+", text))):
                named = os.fsdecode(word)
                if os.path.isfile(named) and os.access(named, os.X_OK):
                    inner = os.stat(named)
                    parts.append(f"{named}:{inner.st_size}:{inner.st_mtime_ns}")
    return "|".join(parts)
