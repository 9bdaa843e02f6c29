"""What a module is compiled for and what this machine can run: CPU levels and GPU archs.

No compiler and no CUDA context is involved: CPU features come from the kernel, GPUs from NVML.
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

# What each x86-64 psABI level, and one that no compiler names, has beyond the one before, in /proc/cpuinfo's spelling.
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
    """``archs`` a module is compiled for: one CPU level, or GPU archs. ``explicit``: somebody asked for these."""

    backend: str
    archs: tuple[str, ...]
    explicit: bool

    def flags(self) -> tuple[str, ...]:
        """Compiler flags: ``-march`` of the C++ compiler (cpu) or ``-gencode`` of nvcc (cuda)."""
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
    """Returns the features that the kernel says this CPU has, in /proc/cpuinfo's spelling."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:  # the first CPU's: a host with hundreds takes milliseconds to list them all
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()


def level_features(level: str) -> tuple[str, ...]:
    """CPU features that code compiled for ``level`` may use."""
    has = level in CPU_LEVELS and CPU_LEVELS[: CPU_LEVELS.index(level) + 1]
    return tuple(sorted(feature for lower in has or () for feature in _LEVEL_FEATURES[lower]))


@cache
def native_level() -> str:
    """Returns the newest level this CPU has, by name, so that the same CPU elsewhere finds the same artifact."""
    if os.uname().machine.lower() not in ("x86_64", "amd64"):
        return "generic"
    return [level for level in CPU_LEVELS if set(level_features(level)) <= cpu_features()][-1]


@cache
def visible_gpus() -> tuple[tuple[int, int], ...]:
    """Compute capabilities of the visible GPUs, sorted, without repeats, without creating a CUDA context."""
    # NVML needs no cuInit, after which a fork would have a broken CUDA.
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
    if words[0][:3] in ("GPU", "MIG"):  # names: any GPU of the machine may be meant
        return list(range(count))
    return [int(word) for word in takewhile(str.isdecimal, words) if int(word) < count]  # as CUDA, up to the first -1


def wanted_target(backend: str) -> Target:
    """Returns what to compile for, by the environment or this machine; a ``ToolchainError`` where neither says."""
    if backend == "cpu":
        level = env.CPU_ARCH.get()
        return Target("cpu", (native_level() if level in (None, "native") else str(level),), level is not None)
    try:
        archs = env.CUDA_ARCH_LIST.get()
    except EnvironmentValueError as err:
        if env.CUDA_ARCH_LIST.is_set:
            raise
        raise ToolchainError(f"{err}, or FLASHINFER_CUDA_ARCH_LIST, which comes first") from None
    if archs:  # torch's list says what to compile for, and is nobody's word about modules that are there
        return Target("cuda", archs, env.CUDA_ARCH_LIST.is_set)
    if not visible_gpus():
        raise ToolchainError(
            "no GPU is visible and no arch is named: to compile CUDA modules here, name the archs to compile for,"
            ' for example FLASHINFER_CUDA_ARCH_LIST="9.0a 8.0"'
        )
    return Target("cuda", tuple(map(native_arch, visible_gpus())), False)


def narrowed(target: Target, archs: tuple[str, ...], name: str) -> Target:
    """Narrows ``target`` to the ``archs`` that the module ``name`` has kernels for; a ``ToolchainError`` if none is."""
    left = tuple(arch for arch in target.archs if not archs or arch.removesuffix("+PTX") in archs)
    if not left:
        of_list = target.explicit or env.TORCH_CUDA_ARCH_LIST.is_set
        has = f"{'asked for' if of_list else 'this machine has'} {' '.join(target.archs)}"
        raise ToolchainError(f"module {name!r} has kernels for {' '.join(archs)} alone, {has}")
    return Target(target.backend, left, target.explicit)


def native_arch(capability: tuple[int, int]) -> str:
    """Returns the arch to compile for a GPU with: wgmma and its kin, from Hopper on, are in the "a" targets alone."""
    return f"{capability[0]}.{capability[1]}{'a' if capability[0] >= 9 else ''}"


def capability(arch: str) -> tuple[int, int]:
    """The compute capability that an arch is named for: ``"9.0a"`` -> ``(9, 0)``."""
    major, minor = arch.removesuffix("+PTX").rstrip("af").split(".")
    return int(major), int(minor)


def why_not_runnable(backend: str, archs: Iterable[str], on_all: bool = True) -> str | None:
    """Why this machine cannot run code compiled for ``archs``, or ``None`` if it can.

    ``on_all``: all of its GPUs must, not only one. Without a visible GPU a CUDA artifact is taken as runnable: nothing
    will be launched.
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
    """Why one of these GPUs, or each of them where one is enough, cannot run code compiled for ``archs``."""
    refused = [gpu for gpu in gpus if not any(runs_on(arch, gpu) for arch in archs)]
    if not refused or (not on_all and len(refused) < len(tuple(gpus))):
        return None
    return f"compiled for {', '.join(archs)}, {machine} has a GPU of {refused[0][0]}.{refused[0][1]}"


# Where the symbol versions of each name are defined.
_RUNTIME = {"GLIBC": "libc.so.6", "GLIBCXX": "libstdc++.so.6", "CXXABI": "libstdc++.so.6", "GCC": "libgcc_s.so.1"}


def why_not_linkable(requires: Mapping[str, str], torch_abi: Iterable[int]) -> str | None:
    """Why this process's C and C++ libraries or torch are too old for a binary, or ``None`` if they are not.

    ``requires``: see ``publish.elf_requirements``. What is not loaded yet is not judged.
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
    """Whether a library of this process has a symbol version.

    Raises:
        OSError: it is not loaded yet, and to load it would decide which one torch gets.
    """
    library = ctypes.CDLL(soname, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    libc = ctypes.CDLL(None)
    libc.dlsym.argtypes, libc.dlerror.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_char_p
    libc.dlerror()
    libc.dlsym(library._handle, version.encode())
    return libc.dlerror() is None


def runs_on(arch: str, gpu: tuple[int, int]) -> bool:
    """Return whether code compiled for ``arch`` runs on a GPU of that compute capability."""
    oldest, name = capability(arch), arch.removesuffix("+PTX")
    if name.endswith("a"):  # of this GPU only, and its PTX too
        return oldest == gpu
    is_portable = name != arch and not name.endswith("f")  # PTX of a family stays in the family
    return oldest <= gpu and (is_portable or oldest[0] == gpu[0])
