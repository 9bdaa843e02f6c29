"""``doctor``: check everything that modules need on this machine, and print commands that fix problems.

The exit code is 1 if CPU modules can be neither built nor used here. Missing CUDA tools are reported but are
no failure.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .. import env
from ..errors import EnvironmentValueError, FlashInferError, ToolchainError
from ..jit import process
from ..jit.artifact import MANIFEST
from ..jit.machine.target import Target, native_level, visible_gpus
from ..jit.machine.toolchain import compiler_environment, find_cxx, find_ninja, find_nvcc, find_python, version_of
from ..jit.machine.workspace import NOEXEC, is_noexec, scratch, workspace_root
from ..jit.modules import Matrix, matrix_specs
from ..jit.spec import TORCH_ABI
from .config import markdown_table, show_config
from .table import show, size
from .usage import Add, json_option

LEAST_GCC, LEAST_CUDA = 11, (12, 4)
LEAST_DISK = 1 << 30
TO_BUILD = {"jinja2": "jinja2", "filelock": "filelock"}  # module -> distribution


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``state``: ``ok``, ``note`` (works less well than it could) or ``missing``."""

    check: str
    state: str
    detail: str
    fix: str = ""


HELP = "Check everything that building and using modules needs, and print commands that fix problems."


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add("--config", action="store_true", help="print every environment variable with its value and default")
    add("--markdown", action="store_true", help="print the variables as the table of docs/environment.md")


def run(options: argparse.Namespace) -> int:
    """Print the findings, or the environment variables."""
    if options.markdown:
        print(markdown_table())
        return 0
    if options.config:
        return show_config(options.json)
    findings: list[Finding] = []
    notes: list[Finding] = []
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvironmentValueError as err:
            if err.name != variable.name:  # the variable that is read instead reports it
                continue
            # An invalid TORCH_CUDA_ARCH_LIST belongs to torch: it prevents only builds for GPUs.
            state, found = ("note", notes) if variable is env.TORCH_CUDA_ARCH_LIST else ("missing", findings)
            found.append(Finding("environment", state, str(err), f"unset {variable.name}"))
    if findings:  # the checks below need valid variables
        _show(findings, options.json)
        return 1
    torch = _torch()
    cpu_tools = [_compiler(), _ninja(), _packages()]
    findings = [*notes, torch, *cpu_tools, *_cuda_tools(), _gpus(), *_directories()]
    usable, modules = _cpu_modules([finding for finding in cpu_tools if finding.state == "missing"])
    findings.append(modules)
    _show(findings, options.json)
    return 0 if usable and torch.state != "missing" else 1


def _show(findings: list[Finding], as_json: bool) -> None:
    """Print one line per finding, and the command that fixes it on the next."""
    if as_json:
        show([asdict(finding) for finding in findings], True)
        return
    for finding in findings:
        print(f"{finding.check:<17} {finding.state:<8} {finding.detail}")
        if finding.fix:
            print(f"{'':<27}fix: {finding.fix}")


def _torch() -> Finding:
    wanted = ".".join(map(str, TORCH_ABI))
    fix = f"pip install 'torch>={wanted}'"
    # A process of its own, because a broken torch may crash and a good one may start CUDA.
    program = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    try:
        run = process.run([find_python(), "-c", program], timeout=300)
    except (OSError, subprocess.SubprocessError, ToolchainError) as err:
        return Finding("torch", "missing", str(err), fix)
    if run.returncode != 0:
        return Finding("torch", "missing", (run.stderr.strip().splitlines() or ["torch cannot be imported"])[-1], fix)
    version, cuda, works = run.stdout.split()[-3:]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < TORCH_ABI:
        return Finding("torch", "missing", f"{version}: wanted {wanted} or newer", fix)
    detail = f"{version}, Python {platform.python_version()}, " + (f"CUDA {cuda}" if cuda != "None" else "without CUDA")
    if visible_gpus() and works != "True":
        return Finding(
            "torch", "note", f"{detail}: it cannot use the GPU of this machine", "install a CUDA build of torch"
        )
    return Finding("torch", "ok", detail)


def _compiler() -> Finding:
    fix = "apt install g++ (or the compiler of your distribution; CXX names another one)"
    try:
        program = find_cxx()
        version = version_of(program)
    except ToolchainError as err:
        return Finding("C++ compiler", "missing", str(err), fix)
    is_gcc = "g++" in os.path.basename(program)
    number = re.search(r"(\d+)\.\d+\.\d+", version)
    if is_gcc and number and int(number[1]) < LEAST_GCC:
        return Finding("C++ compiler", "missing", f"{program} {version}: wanted {LEAST_GCC} or newer", fix)
    level = native_level()
    flags = ["-std=c++17", "-fPIC", "-shared", *Target("cpu", (level,), False).flags()]
    problem = _compile([program, *flags, "-x", "c++"], "#include <string>\nstd::string text;\n")
    if problem:
        return Finding("C++ compiler", "missing", f"{program} cannot build a shared library: {problem}", fix)
    return Finding("C++ compiler", "ok", f"{program} {version}, for {level}")


def _compile(command: list[str], source: str) -> str:
    """Return the first error of compiling a few lines, or an empty string."""
    with scratch() as folder:
        file = folder / "probe"
        file.write_text(source)
        try:
            full = [*command, str(file), "-o", f"{folder}/out"]
            run = process.run(full, timeout=120, env=compiler_environment(folder))
        except (OSError, subprocess.SubprocessError) as err:
            return str(err)
    lines = [line for line in (run.stderr + run.stdout).splitlines() if line.strip()]
    first = next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit code {run.returncode}"
    )
    return first if run.returncode else ""


def _ninja() -> Finding:
    try:
        return Finding("ninja", "ok", find_ninja())
    except ToolchainError as err:
        return Finding("ninja", "missing", str(err), "pip install ninja")


def _packages() -> Finding:
    absent = [package for module, package in TO_BUILD.items() if importlib.util.find_spec(module) is None]
    if absent:
        return Finding(
            "Python packages", "missing", f"{', '.join(absent)} not installed", f"pip install {' '.join(absent)}"
        )
    return Finding("Python packages", "ok", ", ".join(TO_BUILD.values()))


def _cuda_tools() -> Iterator[Finding]:
    fix = "pip install nvidia-cuda-nvcc (or a CUDA toolkit; FLASHINFER_NVCC or CUDA_HOME name it)"
    try:
        program = find_nvcc()
        version = version_of(program)
    except ToolchainError as err:
        yield Finding("nvcc", "note", f"CUDA modules cannot be built: {err}", fix)
        return
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release and (int(release[1]), int(release[2])) < LEAST_CUDA:
        yield Finding("nvcc", "note", f"{program} {version}: wanted {'.'.join(map(str, LEAST_CUDA))} or newer", fix)
        return
    try:
        host = ["-ccbin", find_cxx()]
    except ToolchainError:
        host = []
    problem = _compile([program, *host, "-std=c++17", "-E", "-x", "cu"], "#include <cuda_runtime.h>\n")
    if problem:
        yield Finding(
            "nvcc", "note", f"{program} cannot compile: {problem}", "FLASHINFER_NVCC, CUDA_HOME or CXX name others"
        )
        return
    yield Finding("nvcc", "ok", f"{program} {version}")


def _gpus() -> Finding:
    gpus = visible_gpus()
    if not gpus:
        return Finding(
            "GPU", "note", "none is visible", 'to build for GPUs elsewhere: FLASHINFER_CUDA_ARCH_LIST="9.0a"'
        )
    return Finding("GPU", "ok", f"compute capability {', '.join(f'{a}.{b}' for a, b in gpus)}, driver {_driver()}")


def _driver() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
        if nvml.nvmlInit_v2() != 0:
            return "unknown"
        nvml.nvmlSystemGetDriverVersion(text, len(text))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return "unknown"
    return f"{text.value.decode()} (CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10})"


def _directories() -> Iterator[Finding]:
    for directory in env.aot_dirs():
        if not directory.is_dir():
            yield Finding("prebuilt modules", "note", f"{directory} does not exist", "python scripts/build_aot.py")
        elif not os.access(directory, os.R_OK | os.X_OK):
            yield Finding("prebuilt modules", "note", f"{directory} cannot be read", f"chmod -R a+rX {directory}")
        elif is_noexec(directory):
            fix = "export FLASHINFER_AOT_DIR=/a/directory/that/is/not/mounted/noexec"
            yield Finding("prebuilt modules", "note", f"{directory} cannot be used: {NOEXEC}", fix)
        else:
            count = sum((directory / name / MANIFEST).exists() for name in os.listdir(directory))
            yield Finding("prebuilt modules", "ok", f"{directory}: {count}")
    root, fix = workspace_root(), "export FLASHINFER_WORKSPACE_DIR=/a/directory/of/yours"
    existing = next(path for path in (root, *root.parents) if os.path.exists(path))
    if root.is_relative_to(env.NO_HOME):
        detail = "this user's home directory is not known: built modules are lost when a process ends"
        yield Finding("workspace", "note", detail, fix)
        return
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        detail = f"{root} cannot be written: built modules are lost when a process ends"
        yield Finding("workspace", "note", detail, fix)
        return
    if is_noexec(existing):
        detail = f"{root} cannot be used: {NOEXEC}; modules built elsewhere are lost when a process ends"
        yield Finding("workspace", "note", detail, fix)
        return
    free = shutil.disk_usage(existing).free
    if free < LEAST_DISK:
        yield Finding("workspace", "note", f"{root}: {size(free)} free on its disk", "flashinfer clean --all --yes")
        return
    yield Finding("workspace", "ok", f"{root}: {size(free)} free")


def _cpu_modules(lacking: list[Finding]) -> tuple[bool, Finding]:
    """Return whether every CPU module is built or can be built here, and the finding."""
    try:
        probes = [spec.probe() for spec in matrix_specs(Matrix(backends=("cpu",)))]
    except FlashInferError as err:
        return False, Finding("CPU modules", "missing", str(err))
    missing = [probe for probe in probes if probe.state != "ready"]
    detail = f"{len(probes) - len(missing)} of {len(probes)} are built"
    if not missing:
        return True, Finding("CPU modules", "ok", detail)
    if env.DISABLE_JIT.get():
        return False, Finding(
            "CPU modules", "missing", f"{detail}, and building is off", "unset FLASHINFER_DISABLE_JIT"
        )
    if lacking:
        names = ", ".join(finding.check for finding in lacking)
        return False, Finding("CPU modules", "missing", f"{detail}, and building needs: {names}", lacking[0].fix)
    impossible = [probe.reason for probe in missing if probe.state == "impossible"]
    if impossible:
        return False, Finding("CPU modules", "missing", f"{detail}; {impossible[0]}")
    took = [probe.estimate for probe in missing]
    about = f", in about {sum(filter(None, took)):.0f} s" if None not in took else ""
    return True, Finding("CPU modules", "ok", f"{detail}, the others are built on first use{about}")
