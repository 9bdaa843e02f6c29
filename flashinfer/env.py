"""Every environment variable of the project: one typed place, read when needed and never at import.

``flashinfer doctor --markdown`` prints :data:`VARIABLES` as the table of docs/environment.md.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from .errors import EnvironmentValueError, FlashInferError

T = TypeVar("T")

# The release of this library, which raises with every change of its own. ``flashinfer.__version__`` names the release of
# FlashInfer's interface first, because engines switch features by it. What is stored is marked with this one.
VERSION = "1.0.0"

_PACKAGE = Path(__file__).resolve().parent

# Stands for the home directory of a user without one: nothing can be read or written below a file.
NO_HOME = Path(os.devnull)

VARIABLES: list[Variable] = []  # type: ignore[type-arg]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: its name, what it means, how its text is read and what holds without it."""

    name: str
    doc: str
    wanted: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    default_doc: str

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def get(self) -> T:
        """The value now. Unset and empty mean the default; a malformed value is an error that names the variable."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError as err:
            detail = f" ({err})" if str(err) else ""
            raise EnvironmentValueError(self.name, text, self.wanted + detail) from None

    @property
    def is_set(self) -> bool:
        return bool(os.environ.get(self.name, "").strip())


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


def _flag(name: str, doc: str) -> Variable[bool]:
    return Variable(name, doc, "one of 0, 1, false, true, no, yes, off, on", _boolean, lambda: False, "0")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _words(text: str) -> tuple[str, ...]:
    if "\n" in text:
        raise ValueError("a newline cannot stand in a command")
    return tuple(shlex.split(text))


def _word_list(name: str, doc: str) -> Variable[tuple[str, ...]]:
    return Variable(name, doc, "words quoted as for a shell", _words, lambda: (), "")


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"the home directory that {text.split(os.sep)[0]} stands for is not known") from None
    if not path.is_absolute():
        raise ValueError("relative paths mean another directory in every process")
    return path


def _path_of_workspace(text: str) -> Path:
    """Return an absolute path; without the home directory in its name, one that nothing can be written to."""
    with suppress(RuntimeError):
        Path(text).expanduser()
        return _path(text)
    return NO_HOME / text


def home() -> Path:
    """Return this user's home directory; ``NO_HOME`` for a user without an account and without ``HOME``."""
    with suppress(RuntimeError):
        if (path := Path.home()).is_absolute():
            return path
    return NO_HOME


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError
    return text.upper()


_ARCH = re.compile(r"([1-9]\d*)\.(\d)([af]?)(\+PTX)?", re.IGNORECASE)


def parse_cuda_archs(text: str) -> tuple[str, ...]:
    """``"9.0a;8.0+PTX"`` -> ``("8.0+PTX", "9.0a")``: sorted, without repeats. ``;``, ``,`` and spaces separate."""
    archs = set()
    for word in re.split(r"[;,\s]+", text.strip()):
        match = _ARCH.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not an arch such as 9.0, 9.0a, 10.0f or 8.0+PTX")
        major, minor, suffix, ptx = match.groups()
        archs.add(f"{major}.{minor}{suffix.lower()}{'+PTX' if ptx else ''}")
    return tuple(sorted(archs, key=lambda arch: [int(part) for part in re.findall(r"\d+", arch)] + [arch]))


# Names in torch's list, and what they stand for there.
_GENERATIONS = {
    "kepler+tesla": "3.7", "kepler": "3.5+PTX", "maxwell+tegra": "5.3", "maxwell": "5.0 5.2+PTX",
    "pascal": "6.0 6.1+PTX", "volta+tegra": "7.2", "volta": "7.0+PTX", "turing": "7.5+PTX",
    "ampere+tegra": "8.7", "ampere": "8.0 8.6+PTX", "ada": "8.9+PTX", "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0", "blackwell": "10.0 10.3 12.0 12.1+PTX",
}  # fmt: skip
_LEFT_TO_TORCH = {"native", "auto", "common", "all"}


def parse_torch_archs(text: str) -> tuple[str, ...]:
    """Return the archs of a list in torch's grammar: also names of generations; none where torch is to choose them."""
    words = list[str]()
    for word in filter(None, re.split(r"[;,\s]+", text)):
        name = word.lower()
        if name not in _GENERATIONS:
            name = name.removesuffix("+ptx")
        if name in _LEFT_TO_TORCH:
            return ()
        words += _GENERATIONS.get(name, word).split()
    return parse_cuda_archs(" ".join(words))


def parse_size(text: str) -> int:
    """``"2G"`` -> bytes, in powers of 1024; ``K``, ``M``, ``G``, ``T`` and nothing are units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 500M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def store_url(text: str) -> str:
    """The URL of a store, as ``FLASHINFER_STORE`` has several."""
    if not re.fullmatch(r"(unsigned\+)?(file:///|(?!file:|unsigned\+)[a-z][a-z0-9+.-]*://[^/\s])\S*", text):
        raise ValueError(f"{text!r} is none")
    return text


def _default_workspace() -> Path:
    return (WORKSPACE_BASE.get() or home()) / ".cache" / "flashinfer"


def _default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ARCH_WANTED = "archs such as 9.0a, 8.0, 10.0f or 8.0+PTX, separated by ; , or spaces"

WORKSPACE_DIR: Variable[Path] = Variable(
    "FLASHINFER_WORKSPACE_DIR",
    "Root of the cache: built modules, build directories, history.",
    "an absolute path",
    _path_of_workspace,
    _default_workspace,
    "`~/.cache/flashinfer`",
)
WORKSPACE_BASE: Variable[Path | None] = Variable(
    "FLASHINFER_WORKSPACE_BASE",
    "Stands for the home directory in the default of `FLASHINFER_WORKSPACE_DIR`.",
    "an absolute path",
    _path_of_workspace,
    lambda: None,
    "the home directory",
)
RUNTIME_DIR: Variable[Path | None] = Variable(
    "FLASHINFER_RUNTIME_DIR",
    "Where locks and compile slots live, in a private directory per user; on this machine, not on a network mount.",
    "an absolute path",
    _path,
    lambda: None,
    "`XDG_RUNTIME_DIR`, then the temporary directory, then `/dev/shm`",
)
AOT_DIR: Variable[tuple[Path, ...]] = Variable(
    "FLASHINFER_AOT_DIR",
    "More directories of prebuilt modules, read-only, looked at first, separated as in `PATH`.",
    "absolute paths separated by " + os.pathsep,
    lambda text: tuple(_path(part) for part in text.split(os.pathsep) if part),
    lambda: (),
    "",
)
CUDA_ARCH_LIST: Variable[tuple[str, ...]] = Variable(
    "FLASHINFER_CUDA_ARCH_LIST",
    "GPU archs to compile for: `9.0a`, `8.0`, `10.0f`, `8.0+PTX`.",
    _ARCH_WANTED,
    parse_cuda_archs,
    lambda: TORCH_CUDA_ARCH_LIST.get(),
    "`TORCH_CUDA_ARCH_LIST`, then the visible GPUs",
)
TORCH_CUDA_ARCH_LIST: Variable[tuple[str, ...]] = Variable(
    "TORCH_CUDA_ARCH_LIST",
    "What to compile for where `FLASHINFER_CUDA_ARCH_LIST` is not set, in torch's words; refuses no module that is there.",
    _ARCH_WANTED + ", or names of generations such as Hopper",
    parse_torch_archs,
    lambda: (),
    "the visible GPUs",
)
CPU_ARCH: Variable[str | None] = Variable(
    "FLASHINFER_CPU_ARCH",
    "CPU level to compile for: `native`, `x86-64`, `x86-64-v2`, `x86-64-v3`, `x86-64-v4`, `x86-64-v4+avx512bf16`.",
    "one of native, x86-64, x86-64-v2, x86-64-v3, x86-64-v4, x86-64-v4+avx512bf16",
    lambda text: _one_of(text, ("native", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4+avx512bf16")),
    lambda: None,
    "`native`; a prebuilt module of any level that this CPU has is used as it is",
)
DISABLE_JIT = _flag(
    "FLASHINFER_DISABLE_JIT", "Never compile; every existing artifact, prebuilt or cached, is still used."
)
JIT_VERBOSE = _flag("FLASHINFER_JIT_VERBOSE", "Show every compiler command and its output. Changes output only.")
JIT_DEBUG = _flag("FLASHINFER_JIT_DEBUG", "Debug builds (`-O0 -g`, device checks): different artifacts.")
JIT_EVENTS: Variable[Path | None] = Variable(
    "FLASHINFER_JIT_EVENTS",
    "File that every event (hit, miss, fetch, wait, compile, load) is added to as a line of JSON; many processes may share it.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
JIT_TRACE: Variable[Path | None] = Variable(
    "FLASHINFER_JIT_TRACE",
    "Existing directory that every module asked for is recorded in; `flashinfer trace` sets it.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
STORE: Variable[tuple[str, ...]] = Variable(
    "FLASHINFER_STORE",
    "Stores that a missing module is looked for in before it is built, in order: `s3://bucket/prefix`, `https://host/prefix`,"
    " `file:///mnt/layer`; `unsigned+` before a URL says that its objects need no signature.",
    "URLs such as s3://bucket/prefix or unsigned+file:///mnt/layer, separated by commas",
    lambda text: tuple(store_url(part.strip()) for part in text.split(",")),
    lambda: (),
    "",
)
STORE_KEYS: Variable[Path | None] = Variable(
    "FLASHINFER_STORE_KEYS",
    "File of the public keys whose signatures are trusted, one a line, as `flashinfer store keygen` prints it.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
STORE_TIMEOUT: Variable[float] = Variable(
    "FLASHINFER_STORE_TIMEOUT",
    "Seconds that requests which fail may cost a process, of each store, before it is left alone.",
    "a positive number of seconds",
    _seconds,
    lambda: 5.0,
    "5",
)
STORE_PUBLISH = _flag("FLASHINFER_STORE_PUBLISH", "Write what is built to the first store too.")
STORE_SIGNING_KEY: Variable[Path | None] = Variable(
    "FLASHINFER_STORE_SIGNING_KEY",
    "File of the private key that what is written to a store is signed with.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
WORKSPACE_MAX_SIZE: Variable[int | None] = Variable(
    "FLASHINFER_WORKSPACE_MAX_SIZE",
    "Size that the workspace is brought down to in the background after a build, as by `flashinfer clean`.",
    "a size such as 500M or 2G",
    parse_size,
    lambda: None,
    "no limit",
)
EXTRA_CFLAGS = _word_list("FLASHINFER_EXTRA_CFLAGS", "More flags for the C++ compiler.")
EXTRA_CUDAFLAGS = _word_list("FLASHINFER_EXTRA_CUDAFLAGS", "More flags for nvcc.")
EXTRA_LDFLAGS = _word_list("FLASHINFER_EXTRA_LDFLAGS", "More flags for the linker.")
NVCC: Variable[str | None] = Variable(
    "FLASHINFER_NVCC", "The nvcc to use.", "a program", str, lambda: None, "`CUDA_HOME/bin`, `PATH`, the pip package"
)
CXX: Variable[str | None] = Variable("CXX", "The C++ compiler.", "a program", str, lambda: None, "`g++` on `PATH`")
CUDA_HOME: Variable[Path | None] = Variable(
    "CUDA_HOME", "Where the CUDA toolkit is.", "an absolute path", _path, lambda: None, "where `nvcc` is"
)
NVCC_LAUNCHER = _word_list("FLASHINFER_NVCC_LAUNCHER", "Stands before every nvcc command (`ccache`, `sccache`).")
CXX_LAUNCHER = _word_list("FLASHINFER_CXX_LAUNCHER", "Stands before every C++ compiler command.")
MAX_JOBS: Variable[int] = Variable(
    "MAX_JOBS",
    "Compilers alive at once on this machine, whoever started them; memory may allow fewer.",
    "a positive number",
    _positive,
    _default_jobs,
    "the CPUs at hand",
)
JIT_TIMEOUT: Variable[float | None] = Variable(
    "FLASHINFER_JIT_TIMEOUT",
    "Seconds to wait for another process that builds the same module; then `JitTimeoutError`.",
    "a positive number of seconds",
    _seconds,
    lambda: None,
    "as long as it takes",
)
LOGGING_LEVEL: Variable[str] = Variable(
    "FLASHINFER_LOGGING_LEVEL",
    "Level of the logger `flashinfer`.",
    "one of debug, info, warning, error, critical",
    _level,
    lambda: "WARNING",
    "`warning`",
)


def _one_of(text: str, values: tuple[str, ...]) -> str:
    if text not in values:
        raise ValueError
    return text


@cache
def data_root() -> str:
    """Return the directory that holds ``csrc`` and ``include``: in the package when installed, else the checkout.

    Raises:
        FlashInferError: the package is in an archive, in which no compiler finds a file.
    """
    if not _PACKAGE.is_dir():
        raise FlashInferError(
            f"flashinfer is imported from the archive {_PACKAGE.parent}, and compilers and loaders need files:"
            " unpack it, or install it with pip"
        )
    installed = _PACKAGE / "data"
    return str(installed if (installed / "csrc").is_dir() else _PACKAGE.parent)


def default_aot_dir() -> Path:
    """Where ``scripts/build_aot.py`` publishes and where loaders look after ``FLASHINFER_AOT_DIR``."""
    root = Path(data_root())
    return root / "aot" if root.parent == _PACKAGE else root / "data" / "aot"


def runtime_dirs() -> Iterator[Path]:
    """Yield where a directory for locks may be, best first: local to the machine, one for all processes of a user."""
    if (named := RUNTIME_DIR.get()) is not None:
        yield named
        return
    yield from filter(Path.is_absolute, [Path(os.environ.get("XDG_RUNTIME_DIR", ""))])
    # Looked for only where it is needed: without any, what has a better place goes on.
    if (temporary := temporary_dir()) is not None:
        yield temporary
    yield Path("/dev/shm")


def temporary_dir() -> Path | None:
    """Return the directory for temporary files, or ``None`` where only the working directory can be written."""
    try:
        found, here = tempfile.gettempdir(), os.getcwd()
    except OSError:
        return None
    named = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    is_meant = found != here or found in map(os.path.abspath, (*named, "/tmp", "/var/tmp", "/usr/tmp"))
    return Path(found) if is_meant else None


def temporary_dirs() -> Iterator[Path]:
    """Yield where temporary files may be, best first; whether they can is for the caller to try."""
    yield from filter(None, [temporary_dir()])
    yield from filter(Path.is_absolute, [Path(os.environ.get("XDG_RUNTIME_DIR", ""))])
    with suppress(OSError):
        yield Path(tempfile.gettempdir())  # the working directory, where there is no other


def aot_dirs() -> tuple[Path, ...]:
    """Directories of prebuilt modules in the order in which they are searched."""
    return (*AOT_DIR.get(), default_aot_dir())


# What FlashInfer calls the places, for engines that keep files of their own beside the cache.
_PLACES: dict[str, Callable[[], Path]] = {
    "FLASHINFER_BASE_DIR": lambda: WORKSPACE_BASE.get() or home(),
    "FLASHINFER_CACHE_DIR": WORKSPACE_DIR.get,
    "FLASHINFER_WORKSPACE_DIR": WORKSPACE_DIR.get,
    "FLASHINFER_JIT_DIR": lambda: WORKSPACE_DIR.get() / "artifacts",
    "FLASHINFER_GEN_SRC_DIR": lambda: WORKSPACE_DIR.get() / "build",
    "FLASHINFER_AOT_DIR": default_aot_dir,
    "FLASHINFER_DATA": lambda: Path(data_root()),
    "FLASHINFER_INCLUDE_DIR": lambda: Path(data_root()) / "include",
    "FLASHINFER_CSRC_DIR": lambda: Path(data_root()) / "csrc",
}


def __getattr__(name: str) -> Path:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _PLACES[name]()
