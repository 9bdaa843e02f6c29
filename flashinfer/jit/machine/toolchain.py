"""Build tools: their paths, versions and environment. The versions that compilers report are cached.

Versions change the bytes of an artifact. Compilers get the environment variables listed here, and no others,
because they read many that no key covers: ``LD_RUN_PATH`` changes libraries, ``PTXAS_FLAGS`` changes GPU code,
``COMPILER_PATH`` selects other programs. ``PATH`` selects the assembler and the linker, so their versions count. Flags
are added by ``FLASHINFER_EXTRA_*``. A launcher gets another variable by ``env NAME=VALUE`` in the variable that names
the launcher.
"""

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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ... import env
from ...errors import ToolchainError
from .. import process
from . import trust
from .workspace import workspace_root, write_atomically


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


def toolchain_identity(backend: str, cache_versions: bool = True) -> Identity:
    """Return the identity of the tools of a build here, without a search for tools that change no bytes."""
    return identity_of(find_cxx(), find_nvcc() if backend == "cuda" else None, cache_versions)


def find_cxx() -> str:
    """Return the C++ compiler: ``CXX``, else ``g++``, else ``c++`` on ``PATH``."""
    requested = env.CXX.get()
    if requested and " " in requested and not Path(requested).exists():
        raise ToolchainError(
            f"CXX={requested!r}: wanted one program; a launcher such as ccache goes into FLASHINFER_CXX_LAUNCHER"
        )
    install = "g++ 11 or newer (Debian, Ubuntu: apt install g++)"
    return _find("a C++ compiler", "CXX", requested, _on_path("g++", "c++"), install)


def find_nvcc() -> str:
    """Return nvcc: ``FLASHINFER_NVCC``, ``CUDA_HOME``, ``PATH``, the pip package, the usual directory."""
    requested, home = env.NVCC.get(), env.CUDA_HOME.get()
    if requested is None and home is not None:
        return _find("nvcc", "CUDA_HOME", str(home / "bin" / "nvcc"), (), "a CUDA toolkit there")
    where = (*_on_path("nvcc"), *_in_pip_packages("nvcc"), "/usr/local/cuda/bin/nvcc")
    install = "the CUDA toolkit 12.4 or newer, or: pip install nvidia-cuda-nvcc"
    return _find("nvcc", "FLASHINFER_NVCC", requested, where, install)


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
    siblings = [os.path.join(folder, one) for folder in dict.fromkeys(folders) for one in (name, "python3")]
    # In a program that embeds Python, sys.executable may be that program, which would then run itself.
    this_python = (
        [sys.executable]
        if re.fullmatch(r"\.?python[\d.]*[a-z]?(-(dbg|wrapped))?", os.path.basename(sys.executable or ""))
        else []
    )
    return _find("python", "", None, (*this_python, *siblings, *_on_path(name, "python3")), f"{name}, in PATH")


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


def _find(what: str, variable: str, requested: str | None, where: Iterable[str], install: str) -> str:
    if requested is not None:
        found = shutil.which(requested)
        if found is None:
            raise ToolchainError(f"{variable}: {requested!r} is not a program that runs; unset it or install {install}")
        return _trusted(found, f"{variable}: ")
    candidates = list(where)
    if (path := next(filter(shutil.which, candidates), None)) is not None:
        return _trusted(path)
    searched = f"PATH={os.environ.get('PATH', '')}" + "".join(f", {path}" for path in candidates)
    hint = f" or set {variable}" if variable else ""
    raise ToolchainError(f"cannot find {what}: looked in {searched}; install {install}{hint}")


def _trusted(program: str, named_by: str = "") -> str:
    """Return a program if nobody else can replace or change it.

    The rule is the same for every source of the path.
    """
    real = os.path.realpath(program)
    folders = [os.path.dirname(real), os.path.dirname(os.path.abspath(program))]
    refusal = next(filter(None, map(trust.refusal, dict.fromkeys([real, *folders]))), None)
    # A user who can write next to the interpreter can run code here anyway. sysconfig takes milliseconds: ask it last.
    if refusal is not None and (named_by or folders[-1] not in _interpreter_folders()):
        raise ToolchainError(f"{named_by}{program!r} is not run: {refusal}")
    return program


Identity = dict[str, str | None]

_versions: dict[str, str] = {}


def identity_of(cxx: str, nvcc: str | None, cache_versions: bool = True) -> Identity:
    """Return the versions of the tools, ``None`` for a missing one.

    A compiler starts the assembler and the linker by name. They count even if a compiler has its own, so that equal
    tools have equal keys on every machine. Such a compiler has more keys than it needs.
    """
    tools = {"cxx": cxx, "nvcc": nvcc, "as": shutil.which("as"), "ld": shutil.which("ld")}
    return {name: version_of(program, cache_versions) if program else None for name, program in tools.items()}


def version_of(program: str, cache_versions: bool = True) -> str:
    """Return a compiler's version without its name, because ``g++`` and ``c++`` may be the same compiler."""
    try:
        key = _fingerprint(program)
    except OSError:
        return _ask_version(program)
    if key not in _versions:
        file = workspace_root() / "answers" / hashlib.sha256(os.fsencode(key)).hexdigest()[:32]
        try:
            (_versions[key],) = json.loads(file.read_bytes())  # a truncated file raises
        except (OSError, ValueError, TypeError):
            _versions[key] = _ask_version(program)
            if cache_versions:
                with suppress(OSError):  # the next process asks again
                    write_atomically(file, json.dumps([_versions[key]]).encode())
    return _versions[key]


def _ask_version(program: str) -> str:
    command, variables = [program, "--version"], compiler_environment()
    try:
        run = process.run(command, timeout=60, env=variables)
        run.check_returncode()
    except (OSError, subprocess.SubprocessError) as err:
        detail = getattr(err, "stderr", "") or str(err)
        raise ToolchainError(f"{' '.join(command)} does not answer: {detail.strip()}") from None
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    release = [line for line in lines if line.startswith("Cuda compilation tools")]
    # nvcc prints its version near the end, g++ and clang++ in the first line after their name.
    return release[0] if release else re.sub(r"^\S+\s+", "", lines[0]) if lines else "unknown"


def _fingerprint(path: str) -> str:
    """Return text that identifies a program on disk. A script's text includes the programs that it names."""
    real = os.path.realpath(path)
    parts = [_stamp(real)]
    if os.path.getsize(real) < 65536:
        text = Path(real).read_bytes()
        parts.append(hashlib.sha256(text).hexdigest())
        named = sorted({os.fsdecode(word) for word in re.findall(rb"/[\w./+-]+", text)})
        parts += map(_stamp, filter(shutil.which, named if text.startswith(b"#!") else []))
    return "|".join(parts)


def _stamp(path: str) -> str:
    status = os.stat(path)
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"


# Programs find other programs, libraries, files and the user by these. No compiler writes them into its output.
_ALLOWED = {
    "PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME",
}  # fmt: skip
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}  # in lower or upper case
# Variables of caching and distributing launchers and of their stores. No compiler reads them.
_LAUNCHERS = ("CCACHE_", "SCCACHE_", "ICECC_", "DISTCC_", "AWS_", "AZURE_", "GOOGLE_", "ACTIONS_")
# The command, not a variable, selects the compiler that a launcher starts.
_OTHER_COMPILERS = {
    "CCACHE_CC", "CCACHE_COMPILER", "CCACHE_COMPILERTYPE", "CCACHE_PREFIX", "CCACHE_PREFIX_CPP",
    "ICECC_CC", "ICECC_CXX",
}  # fmt: skip


def compiler_environment(folder: str | Path = "") -> dict[str, str]:
    """Return the environment of compilers.

    They may write below ``folder`` if there is no temporary directory.
    """
    allowed = {name: value for name, value in os.environ.items() if _is_allowed(name)}
    if (temporary := env.temporary_dir() or folder) != "":
        allowed["TMPDIR"] = str(temporary)
    # __DATE__ is the same in every build, and messages are in English.
    return allowed | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def _is_allowed(name: str) -> bool:
    if name in _OTHER_COMPILERS:
        return False
    return name in _ALLOWED or name.lower() in _PROXIES or name.startswith(_LAUNCHERS)
