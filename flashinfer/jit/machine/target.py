"""Targets of compilation, CPU levels and GPU archs, and the check that this machine runs them.

No compiler and no CUDA context is needed: CPU features come from the kernel, GPUs from NVML.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from ... import env
from ...errors import EnvironmentValueError, ToolchainError
from .arch import Arch

# Features that each x86-64 psABI level adds to the previous one, spelled as in /proc/cpuinfo. The psABI does not
# define the last level.
_LEVEL_FEATURES = {
    "x86-64": (),
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
    "x86-64-v4+avx512bf16": ("avx512_bf16",),
}
CPU_LEVELS = tuple(_LEVEL_FEATURES)


@dataclass(frozen=True)
class Target:
    """The ``archs`` a module is compiled for: one CPU level, or GPU archs.

    ``explicit``: named by the user.
    """

    backend: str
    archs: tuple[str, ...]
    explicit: bool

    def flags(self) -> tuple[str, ...]:
        """Return compiler flags: ``-march`` of the C++ compiler (cpu) or ``-gencode`` of nvcc (cuda)."""
        flags = list[str]()
        for name, *more in (arch.split("+") for arch in self.archs if arch != "generic"):
            if self.backend == "cpu":
                flags += [f"-march={name}", *(f"-m{feature}" for feature in more)]
            else:
                number, kinds = name.replace(".", ""), ["sm", *(["compute"] if more else [])]
                flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
        return tuple(flags)


@cache
def cpu_features() -> frozenset[str]:
    """Return the features of this CPU, as the kernel spells them in /proc/cpuinfo."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:  # only the first CPU: listing hundreds takes milliseconds
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()


def level_features(level: str) -> tuple[str, ...]:
    """Return the CPU features that code compiled for ``level`` may use."""
    has = level in CPU_LEVELS and CPU_LEVELS[: CPU_LEVELS.index(level) + 1]
    return tuple(sorted(feature for lower in has or () for feature in _LEVEL_FEATURES[lower]))


@cache
def native_level() -> str:
    """Return the newest level of this CPU by name, so that an equal CPU elsewhere finds the same artifact."""
    if os.uname().machine.lower() not in ("x86_64", "amd64"):
        return "generic"
    return [level for level in CPU_LEVELS if set(level_features(level)) <= cpu_features()][-1]


@cache
def visible_gpus() -> tuple[tuple[int, int], ...]:
    """Return the capabilities of the visible GPUs, sorted and unique, without creating a CUDA context."""
    # NVML needs no cuInit. After a cuInit, CUDA is broken in forked children.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}))
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    count, capabilities = ctypes.c_uint(), set()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in _visible_indices(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
            capabilities.add((major.value, minor.value))
    nvml.nvmlShutdown()
    return tuple(sorted(capabilities))


def _visible_indices(count: int) -> list[int]:
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "GPU").split(",")]
    if words[0][:3] in ("GPU", "MIG"):  # names may mean any GPU of the machine
        return list(range(count))
    # CUDA stops at the first -1.
    return [int(word) for word in takewhile(str.isdecimal, words) if int(word) < count]


def wanted_target(backend: str) -> Target:
    """Return the target that the environment names, else the target of this machine.

    Raises:
        ToolchainError: the environment names no archs, and no GPU is visible.
    """
    if backend == "cpu":
        level = env.CPU_ARCH.get()
        return Target("cpu", (native_level() if level in (None, "native") else str(level),), level is not None)
    try:
        archs = env.CUDA_ARCH_LIST.get()
    except EnvironmentValueError as err:
        if env.CUDA_ARCH_LIST.is_set:
            raise
        raise ToolchainError(f"{err}, or FLASHINFER_CUDA_ARCH_LIST, which comes first") from None
    if archs:  # torch's list selects what to compile, but must not reject existing modules
        return Target("cuda", archs, env.CUDA_ARCH_LIST.is_set)
    if not visible_gpus():
        raise ToolchainError(
            "no GPU is visible and no arch is named: to compile CUDA modules here, name the archs to compile for,"
            ' for example FLASHINFER_CUDA_ARCH_LIST="9.0a 8.0"'
        )
    return Target("cuda", tuple(str(Arch.native(gpu)) for gpu in visible_gpus()), False)


def narrowed(target: Target, archs: tuple[str, ...], name: str) -> Target:
    """Return the part of ``target`` for which module ``name`` has kernels. They exist for ``archs`` only.

    Raises:
        ToolchainError: the module has no kernels for the target.
    """
    if not archs:
        return target
    left = (kernels.compiled_for(Arch.of(one)) for one in target.archs for kernels in map(Arch.of, archs))
    found = tuple(dict.fromkeys(str(arch) for arch in left if arch is not None))
    if not found:
        of_list = target.explicit or env.TORCH_CUDA_ARCH_LIST.is_set
        has = f"{'the request names' if of_list else 'this machine has'} {' '.join(target.archs)}"
        raise ToolchainError(f"module {name!r} has kernels only for {' '.join(archs)}, {has}")
    return Target(target.backend, found, target.explicit)


def why_not_runnable(backend: str, archs: Iterable[str], on_all: bool = True) -> str | None:
    """Return why this machine cannot run code compiled for ``archs``, or ``None`` if it can.

    ``on_all``: all GPUs must run the code, not only one. Without a visible GPU a CUDA artifact counts as
    runnable, because nothing will be launched.
    """
    if backend == "cpu":
        for level in archs:
            if level not in (*CPU_LEVELS, "generic"):
                return f"compiled for {level}, which is no level known here"
            missing = sorted(set(level_features(level)) - cpu_features())
            if missing:
                return f"compiled for {level}, this CPU lacks {', '.join(missing)}"
            if (level == "generic") != (native_level() == "generic"):
                return f"compiled for {level}, this machine is {os.uname().machine}"
        return None
    return why_not_on(visible_gpus(), archs, "this machine", on_all)


def why_not_on(gpus: Iterable[tuple[int, int]], archs: Iterable[str], machine: str, on_all: bool) -> str | None:
    """Return why code for ``archs`` does not run on all GPUs (``on_all``) or on any GPU, or ``None``."""
    refused = [gpu for gpu in gpus if not any(Arch.of(arch).runs_on(gpu) for arch in archs)]
    if not refused or (not on_all and len(refused) < len(tuple(gpus))):
        return None
    return f"compiled for {', '.join(archs)}, {machine} has a GPU of {refused[0][0]}.{refused[0][1]}"


# Prefix of symbol versions -> the library that defines them.
_RUNTIME = {"GLIBC": "libc.so.6", "GLIBCXX": "libstdc++.so.6", "CXXABI": "libstdc++.so.6", "GCC": "libgcc_s.so.1"}


def why_not_linkable(requires: Mapping[str, str], torch_abi: Iterable[int]) -> str | None:
    """Return why this process's C and C++ libraries or torch are too old for a binary, or ``None``.

    ``requires``: see ``artifact.elf_requirements``. A library that is not loaded yet is not checked.
    """
    for name in filter(_RUNTIME.get, requires):
        with suppress(OSError):
            if not _defines(_RUNTIME[name], version := f"{name}_{requires[name]}"):
                return f"needs {version}, which {_RUNTIME[name]} of this process does not have"
    torch = sys.modules.get("torch")
    if torch is not None and [int(part) for part in torch.__version__.split(".")[:2]] < [*torch_abi]:
        return f"needs torch {'.'.join(map(str, torch_abi))} or newer, this is {torch.__version__}"
    return None


@cache
def _defines(soname: str, version: str) -> bool:
    """Return whether a library of this process has a symbol version.

    Raises:
        OSError: the library is not loaded yet. It must not be loaded here: torch loads its own copy.
    """
    library = ctypes.CDLL(soname, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    libc = ctypes.CDLL(None)
    libc.dlsym.argtypes, libc.dlerror.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_char_p
    libc.dlerror()
    libc.dlsym(library._handle, version.encode())
    return libc.dlerror() is None
