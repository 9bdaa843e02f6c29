"""What a module is compiled for and what this machine can run: CPU levels and GPU archs.

No compiler and no CUDA context is involved: CPU features come from the kernel, GPUs from NVML.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from ... import env
from ...errors import ToolchainError

# Features of each x86-64 psABI level, and of one more that the compiler has no name for, in /proc/cpuinfo's spelling; each
# level has those of the one before.
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
        if self.backend == "cpu":
            return tuple(flag for arch in self.archs if arch != "generic" for flag in _march(arch))
        return tuple(flag for arch in self.archs for flag in _gencode(arch))


def _march(level: str) -> Iterable[str]:
    name, *features = level.split("+")
    return (f"-march={name}", *(f"-m{feature}" for feature in features))


def _gencode(arch: str) -> Iterable[str]:
    number = arch.removesuffix("+PTX").replace(".", "")
    yield f"-gencode=arch=compute_{number},code=sm_{number}"
    if arch.endswith("+PTX"):
        yield f"-gencode=arch=compute_{number},code=compute_{number}"


@cache
def cpu_features() -> frozenset[str]:
    """What the kernel says this CPU can do, in /proc/cpuinfo's spelling."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:  # the first CPU's: a host with hundreds takes milliseconds to list them all
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def level_features(level: str) -> tuple[str, ...]:
    """CPU features that code compiled for ``level`` may use."""
    levels = list(_LEVEL_FEATURES)
    if level not in levels:
        return ()
    return tuple(sorted(f for lower in levels[: levels.index(level) + 1] for f in _LEVEL_FEATURES[lower]))


@cache
def native_level() -> str:
    """The highest level this CPU has; named, so that the same CPU elsewhere finds the same artifact."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "generic"
    return [level for level in _LEVEL_FEATURES if set(level_features(level)) <= cpu_features()][-1]


@cache
def visible_gpus() -> tuple[tuple[int, int], ...]:
    """Compute capabilities of the visible GPUs, sorted, without repeats, without creating a CUDA context."""
    # torch knows at once, if it has a context. NVML needs no cuInit, after which a fork would have a broken CUDA.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}))
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count, capabilities = ctypes.c_uint(), set()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in _visible_indices(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
                capabilities.add((major.value, minor.value))
        return tuple(sorted(capabilities))
    finally:
        nvml.nvmlShutdown()


def _visible_indices(count: int) -> list[int]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    words = [word.strip() for word in visible.split(",")]
    if all(word.isdecimal() for word in words):
        return [int(word) for word in words if int(word) < count]
    # UUIDs and MIG names: any GPU of the machine may be meant. Empty and -1 hide all.
    return list(range(count)) if words[0][:3] in ("GPU", "MIG") else []


def wanted_target(backend: str) -> Target:
    """What to compile for now: the environment's word, else this machine.

    Raises:
        ToolchainError: a CUDA module is wanted, no GPU is visible and no arch is named.
    """
    if backend == "cpu":
        level = env.CPU_ARCH.get()
        return Target("cpu", (native_level() if level in (None, "native") else str(level),), level is not None)
    archs = env.CUDA_ARCH_LIST.get()
    if archs:
        return Target("cuda", archs, True)
    if not visible_gpus():
        raise ToolchainError(
            "no GPU is visible and no arch is named: to compile CUDA modules here, name the archs to compile for,"
            ' for example FLASHINFER_CUDA_ARCH_LIST="9.0a 8.0"'
        )
    return Target("cuda", tuple(map(native_arch, visible_gpus())), False)


def narrowed(target: Target, archs: tuple[str, ...], name: str) -> Target:
    """``target`` for the module ``name``, whose kernels are for ``archs`` alone; for any, where these are none.

    Raises:
        ToolchainError: none of the target's archs is among them.
    """
    left = tuple(arch for arch in target.archs if not archs or arch.removesuffix("+PTX") in archs)
    if not left:
        has = f"asked for {' '.join(target.archs)}" if target.explicit else f"this machine has {' '.join(target.archs)}"
        raise ToolchainError(f"module {name!r} has kernels for {' '.join(archs)} alone, {has}")
    return Target(target.backend, left, target.explicit)


def native_arch(capability: tuple[int, int]) -> str:
    """What to compile for a GPU: from Hopper on what matters (wgmma, TMA variants) is arch-specific, the "a" targets."""
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
                return f"compiled for {level}, this machine is {platform.machine()}"
        return None
    return why_not_on(visible_gpus(), archs, "this machine", on_all)


def why_not_on(gpus: Iterable[tuple[int, int]], archs: Iterable[str], machine: str, on_all: bool) -> str | None:
    """Why one of these GPUs, or each of them where one is enough, cannot run code compiled for ``archs``."""
    refused = [gpu for gpu in gpus if not any(runs_on(arch, gpu) for arch in archs)]
    if not refused or (not on_all and len(refused) < len(tuple(gpus))):
        return None
    return f"compiled for {', '.join(archs)}, {machine} has a GPU of {refused[0][0]}.{refused[0][1]}"


# Where the symbol versions of each name are defined. A library of the C++ runtime is looked at where this process has
# it already: to load one here would decide which one torch gets.
_RUNTIME = {"GLIBC": "libc.so.6", "GLIBCXX": "libstdc++.so.6", "CXXABI": "libstdc++.so.6", "GCC": "libgcc_s.so.1"}


def why_not_linkable(requires: Mapping[str, str], torch_abi: Iterable[int]) -> str | None:
    """Why this process's C and C++ libraries or torch are too old for a binary, or ``None`` if they are not.

    ``requires``: see ``publish.elf_requirements``. What is not loaded yet is not judged.
    """
    for name, version in requires.items():
        library = _RUNTIME.get(name)
        if library is not None and not _defines(library, f"{name}_{version}"):
            return f"needs {name}_{version}, which {library} of this process does not have"
    torch = sys.modules.get("torch")
    if torch is not None and [int(part) for part in torch.__version__.split(".")[:2]] < [*torch_abi]:
        return f"needs torch {'.'.join(map(str, torch_abi))} or newer, this is {torch.__version__}"
    return None


_defined: dict[tuple[str, str], bool] = {}


def _defines(soname: str, version: str) -> bool:
    """Whether a library of this process has a symbol version. A version is a symbol too, of value 0, which takes
    microseconds to look up where reading the library's file takes milliseconds."""
    known = _defined.get((soname, version))
    if known is None:
        try:
            library = ctypes.CDLL(soname, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            return soname != "libc.so.6"  # another libc altogether, or not loaded yet
        libc = ctypes.CDLL(None)
        libc.dlsym.argtypes, libc.dlerror.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_char_p
        libc.dlerror()
        libc.dlsym(library._handle, version.encode())
        known = _defined[soname, version] = libc.dlerror() is None
    return known


def runs_on(arch: str, gpu: tuple[int, int]) -> bool:
    """Whether code compiled for ``arch`` runs on a GPU of that compute capability."""
    major, minor = capability(arch)
    if arch.removesuffix("+PTX").endswith("a"):
        return (major, minor) == gpu
    if arch.endswith("+PTX") and (major, minor) <= gpu:
        return True
    return major == gpu[0] and minor <= gpu[1]
