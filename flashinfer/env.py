"""All environment variables of the project, typed and documented. They are read when needed, never at import.

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

# Release of this library. It changes with the library, and stored artifacts are marked with it.
# ``__version__`` begins with the release of FlashInfer's interface instead, because engines select features
# by it.
VERSION = "1.0.0"

_PACKAGE = Path(__file__).resolve().parent

# Replaces the home directory of a user without one: nothing can be read or written below a file.
NO_HOME = Path(os.devnull)

VARIABLES: list[Variable] = []  # type: ignore[type-arg]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: name, documentation, parser and default."""

    name: str
    doc: str
    wanted: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    default_doc: str

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def get(self) -> T:
        """Return the current value, or the default if the text is empty. An invalid text raises an error."""
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
        raise ValueError("a command cannot contain a newline")
    return tuple(shlex.split(text))


def _word_list(name: str, doc: str) -> Variable[tuple[str, ...]]:
    return Variable(name, doc, "words quoted as for a shell", _words, lambda: (), "")


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"the home directory of {text.split(os.sep)[0]} is not known") from None
    if not path.is_absolute():
        raise ValueError("a relative path names another directory in every process")
    return path


def _path_of_workspace(text: str) -> Path:
    """Return an absolute path. If its home directory is not known, nothing can be written to the path."""
    with suppress(RuntimeError):
        Path(text).expanduser()
        return _path(text)
    return NO_HOME / text


def home() -> Path:
    """Return this user's home directory, or ``NO_HOME`` if the user has no account and no ``HOME``."""
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
    """Return archs sorted and without repeats: ``"9.0a;8.0+PTX"`` -> ``("8.0+PTX", "9.0a")``."""
    archs = set()
    for word in re.split(r"[;,\s]+", text.strip()):
        match = _ARCH.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not an arch such as 9.0, 9.0a, 10.0f or 8.0+PTX")
        major, minor, suffix, ptx = match.groups()
        archs.add(f"{major}.{minor}{suffix.lower()}{'+PTX' if ptx else ''}")
    return tuple(sorted(archs, key=lambda arch: [int(part) for part in re.findall(r"\d+", arch)] + [arch]))


# Names of generations in torch's list, and their archs.
_GENERATIONS = {
    "kepler+tesla": "3.7", "kepler": "3.5+PTX", "maxwell+tegra": "5.3", "maxwell": "5.0 5.2+PTX",
    "pascal": "6.0 6.1+PTX", "volta+tegra": "7.2", "volta": "7.0+PTX", "turing": "7.5+PTX",
    "ampere+tegra": "8.7", "ampere": "8.0 8.6+PTX", "ada": "8.9+PTX", "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0", "blackwell": "10.0 10.3 12.0 12.1+PTX",
}  # fmt: skip
_LEFT_TO_TORCH = {"native", "auto", "common", "all"}


def parse_torch_archs(text: str) -> tuple[str, ...]:
    """Return the archs of a list in torch's grammar, which has names of generations. Empty: torch chooses."""
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
    """Return bytes: ``"2G"`` is 2 * 1024**3. Units are ``K``, ``M``, ``G``, ``T`` or none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 500M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def store_url(text: str) -> str:
    """Return ``text`` if it is the URL of a store."""
    if not re.fullmatch(r"(unsigned\+)?(file:///|(?!file:|unsigned\+)[a-z][a-z0-9+.-]*://[^/\s])\S*", text):
        raise ValueError(f"{text!r} is not a store URL")
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
    "Replaces the home directory in the default of `FLASHINFER_WORKSPACE_DIR`.",
    "an absolute path",
    _path_of_workspace,
    lambda: None,
    "the home directory",
)
RUNTIME_DIR: Variable[Path | None] = Variable(
    "FLASHINFER_RUNTIME_DIR",
    "Directory of locks and compile slots. Each user has a private subdirectory. It must be local, not a network mount.",
    "an absolute path",
    _path,
    lambda: None,
    "`XDG_RUNTIME_DIR`, then the temporary directory, then `/dev/shm`",
)
AOT_DIR: Variable[tuple[Path, ...]] = Variable(
    "FLASHINFER_AOT_DIR",
    "More read-only directories of prebuilt modules, searched first. Separated as in `PATH`.",
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
    "Archs to compile for if `FLASHINFER_CUDA_ARCH_LIST` is not set, in torch's grammar. It selects targets of builds"
    " only: loads also use modules of other archs.",
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
    "`native`. The CPU also uses prebuilt modules of lower levels.",
)
DISABLE_JIT = _flag("FLASHINFER_DISABLE_JIT", "Never compile. Existing artifacts, prebuilt or cached, are still used.")
JIT_VERBOSE = _flag("FLASHINFER_JIT_VERBOSE", "Show every compiler command and its output.")
JIT_DEBUG = _flag("FLASHINFER_JIT_DEBUG", "Debug builds (`-O0 -g`, device checks), with artifacts of their own.")
JIT_EVENTS: Variable[Path | None] = Variable(
    "FLASHINFER_JIT_EVENTS",
    "File to append events to (hit, miss, fetch, wait, compile, load), as lines of JSON. Processes may share it.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
JIT_TRACE: Variable[Path | None] = Variable(
    "FLASHINFER_JIT_TRACE",
    "Existing directory to record every requested module in. `flashinfer trace` sets it.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
STORE: Variable[tuple[str, ...]] = Variable(
    "FLASHINFER_STORE",
    "Stores to search for a missing module before it is built, in order: `s3://bucket/prefix`, `https://host/prefix`,"
    " `file:///mnt/layer`. With the prefix `unsigned+`, objects need no signature.",
    "URLs such as s3://bucket/prefix or unsigned+file:///mnt/layer, separated by commas",
    lambda text: tuple(store_url(part.strip()) for part in text.split(",")),
    lambda: (),
    "",
)
STORE_KEYS: Variable[Path | None] = Variable(
    "FLASHINFER_STORE_KEYS",
    "File of the trusted public keys, one per line, as `flashinfer store keygen` prints them.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
STORE_TIMEOUT: Variable[float] = Variable(
    "FLASHINFER_STORE_TIMEOUT",
    "Seconds that a process may spend on failing requests to one store. Then it stops using that store.",
    "a positive number of seconds",
    _seconds,
    lambda: 5.0,
    "5",
)
STORE_PUBLISH = _flag("FLASHINFER_STORE_PUBLISH", "Also write built modules to the first store.")
STORE_SIGNING_KEY: Variable[Path | None] = Variable(
    "FLASHINFER_STORE_SIGNING_KEY",
    "File of the private key that signs modules written to a store.",
    "an absolute path",
    _path,
    lambda: None,
    "",
)
WORKSPACE_MAX_SIZE: Variable[int | None] = Variable(
    "FLASHINFER_WORKSPACE_MAX_SIZE",
    "Size limit of the workspace. After a build, a background thread removes the least recently used modules, as "
    "`flashinfer clean --max-size` does.",
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
    "CUDA_HOME", "Directory of the CUDA toolkit.", "an absolute path", _path, lambda: None, "that of `nvcc`"
)
NVCC_LAUNCHER = _word_list("FLASHINFER_NVCC_LAUNCHER", "Prefix of every nvcc command (`ccache`, `sccache`).")
CXX_LAUNCHER = _word_list("FLASHINFER_CXX_LAUNCHER", "Prefix of every C++ compiler command.")
MAX_JOBS: Variable[int] = Variable(
    "MAX_JOBS",
    "Compilers that run at once on this machine, for all processes of the user. Memory may allow fewer.",
    "a positive number",
    _positive,
    _default_jobs,
    "the number of usable CPUs",
)
COMM_TIMEOUT: Variable[float] = Variable(
    "FLASHINFER_COMM_TIMEOUT",
    "Seconds that a collective waits for another rank, which may be compiling. Then `GroupError` names the rank."
    " Workspaces read it when they are made.",
    "a positive number of seconds",
    _seconds,
    lambda: 600.0,
    "600",
)
JIT_TIMEOUT: Variable[float | None] = Variable(
    "FLASHINFER_JIT_TIMEOUT",
    "Seconds to wait for another process that builds the same module. Then `JitTimeoutError` is raised.",
    "a positive number of seconds",
    _seconds,
    lambda: None,
    "no limit",
)
BATCH_INVARIANT = _flag(
    "FLASHINFER_BATCH_INVARIANT", "Give each row the same bits in every batch, at a cost. See docs/batch-invariance.md."
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
    """Return the directory of ``csrc`` and ``include``: in the package when installed, else the checkout.

    Raises:
        FlashInferError: the package is in an archive, where compilers find no file.
    """
    if not _PACKAGE.is_dir():
        raise FlashInferError(
            f"flashinfer is imported from the archive {_PACKAGE.parent}, and compilers and loaders need files:"
            " unpack it, or install it with pip"
        )
    installed = _PACKAGE / "data"
    return str(installed if (installed / "csrc").is_dir() else _PACKAGE.parent)


def default_aot_dir() -> Path:
    """Return the directory that ``flashinfer aot`` publishes to.

    Loaders search it after ``FLASHINFER_AOT_DIR``.
    """
    root = Path(data_root())
    return root / "aot" if root.parent == _PACKAGE else root / "data" / "aot"


def runtime_dirs() -> Iterator[Path]:
    """Yield directories for locks, best first: local to the machine, shared by a user's processes."""
    if (named := RUNTIME_DIR.get()) is not None:
        yield named
        return
    yield from filter(Path.is_absolute, [Path(os.environ.get("XDG_RUNTIME_DIR", ""))])
    # The search costs time and may fail, so it runs only if the first candidates do not serve.
    if (temporary := temporary_dir()) is not None:
        yield temporary
    yield Path("/dev/shm")


def temporary_dir() -> Path | None:
    """Return the directory for temporary files, or ``None`` if only the working directory can be written."""
    try:
        found, here = tempfile.gettempdir(), os.getcwd()
    except OSError:
        return None
    named = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    is_meant = found != here or found in map(os.path.abspath, (*named, "/tmp", "/var/tmp", "/usr/tmp"))
    return Path(found) if is_meant else None


def temporary_dirs() -> Iterator[Path]:
    """Yield candidates for temporary files, best first. The caller has to try them."""
    yield from filter(None, [temporary_dir()])
    yield from filter(Path.is_absolute, [Path(os.environ.get("XDG_RUNTIME_DIR", ""))])
    with suppress(OSError):
        yield Path(tempfile.gettempdir())  # may be the working directory


def aot_dirs() -> tuple[Path, ...]:
    """Return the directories of prebuilt modules in search order."""
    return (*AOT_DIR.get(), default_aot_dir())


# FlashInfer's names of the directories, for engines that keep files next to the cache.
_DIRECTORIES: dict[str, Callable[[], Path]] = {
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
    if name not in _DIRECTORIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _DIRECTORIES[name]()
