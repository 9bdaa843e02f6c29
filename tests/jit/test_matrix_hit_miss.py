"""Hits and misses: changes that must not compile again, and changes that must, one case per line.

Each case builds a module once under a launcher that counts compilers, changes one thing, and looks it up
again in a new process. ``ELSEWHERE`` names the tests of other files that cover a line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.processes import python_path
from ..support.slow import few

ROOT = Path(__file__).resolve().parents[2]
CXX_FILES = {
    "unit.cc": '#include "unit.h"\nextern "C" int answer() { return ANSWER; }\n',
    "unit.h": "#define ANSWER 42\n",
}
CUDA_FILES = {
    "unit.cu": '#include "unit.cuh"\n__global__ void fill(int *out) { *out = ANSWER; }\nextern "C" int answer() { return ANSWER; }\n',
    "unit.cuh": "#define ANSWER 42\n",
}
# Builds missing modules, and reports the path, whether a tool was started, and the number of written files.
BUILD = """
    import json, os, sys
    started = []
    sys.addaudithook(lambda event, args: started.append(args[0]) if event in ("subprocess.Popen", "os.posix_spawn") else None)
    from flashinfer.jit import gen_jit_spec
    import flashinfer.jit.build  # now: another user may not be able to read this interpreter's library
    {before}
    options = json.loads(sys.argv[2])
    artifact = gen_jit_spec("tiny", json.loads(sys.argv[1]), **options).build()
    print(artifact.path, len(started))
"""

ELSEWHERE = {
    "batch build, then single load, then batch again": "test_build:test_a_batch_reuses_a_single_build_and_the_reverse",
    "a warm process starts nothing and takes no lock": "test_warm_start:test_twenty_modules",
    "an operator without a toolchain on a read-only tree": "test_build:test_first_call_builds_with_one_line_and_later_processes_start_nothing",
    "any edit in the closure": "test_identity_property:test_an_edit_inside_changes_the_key",
    "no edit outside of it": "test_identity_property:test_an_edit_outside_does_not",
    "two specs that differ": "test_identity_property:test_two_specs_never_encode_alike",
    "CPU features that this machine lacks": "test_lookup:test_a_cpu_that_lacks_a_feature_skips_the_artifact",
    "GPU archs that this machine lacks": "test_lookup:test_gpus",
    "glibc, libstdc++ and torch too old": "test_lookup:test_a_manifest_that_does_not_fit",
    "a file owned by somebody else": "test_trust:test_paths_of_another_user_are_refused",
    "a file that others can write": "test_trust:test_paths_that_others_can_write_are_refused",
    "a file replaced between check and load": "test_load:test_a_file_replaced_after_the_check_is_not_mapped",
}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


class Module:
    """A module of two files, and a method that builds it in a process of its own."""

    def __init__(self, folder: Path, python: Callable, compilers: Callable[[], int]) -> None:
        self.folder, self._python, self.compilers = folder, python, compilers
        self.options: dict[str, object] = {}
        self.variables: dict[str, str | None] = {}
        self.before = ""
        self.files: dict[str, str] = {}

    def write(self, files: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = files
        for name, text in files.items():
            (self.folder / name).write_text(text)

    @property
    def header(self) -> Path:
        return next(self.folder / name for name in self.files if name.endswith("h"))

    @property
    def source(self) -> Path:
        return next(self.folder / name for name in self.files if not name.endswith("h"))

    def ask(self) -> tuple[Path, int]:
        """Return the artifact's path and the number of processes that were started for it."""
        sources = json.dumps([str(self.source)])
        program = BUILD.format(before=self.before)
        done = self._python(program, sources, json.dumps(self.options), **self.variables)
        path, _, started = done.stdout.strip().rpartition(" ")
        return Path(path), int(started)


@pytest.fixture
def module(tmp_path, python, compilers_started) -> Module:
    one = Module(tmp_path / "src", python, compilers_started)
    one.write(CXX_FILES)
    one.variables["FLASHINFER_CUDA_ARCH_LIST"] = "8.0"
    return one


def with_times(seconds: Callable[[], float]) -> Callable[[Module, Path], None]:
    def change(module: Module, tmp_path: Path) -> None:
        for name in module.files:
            os.utime(module.folder / name, (seconds(), seconds()))

    return change


def copy_without_times(module: Module, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "workspace", tmp_path / "copied", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "workspace")
    module.variables["FLASHINFER_WORKSPACE_DIR"] = str(tmp_path / "copied")


def move_the_cache(module: Module, tmp_path: Path) -> None:
    (tmp_path / "workspace").rename(tmp_path / "moved")
    module.variables["FLASHINFER_WORKSPACE_DIR"] = str(tmp_path / "moved")


def move_the_sources(module: Module, tmp_path: Path) -> None:
    module.folder = module.folder.rename(tmp_path / "elsewhere")


def write_the_sources_again(module: Module, tmp_path: Path) -> None:
    shutil.rmtree(module.folder)
    module.write(module.files)


def another_order_of_path(module: Module, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folders = os.environ["PATH"].split(os.pathsep)
    module.variables["PATH"] = os.pathsep.join([str(tmp_path / "empty"), *reversed(folders), "/nowhere"])


def compiler_through_a_link(module: Module, tmp_path: Path) -> None:
    (tmp_path / "g++").symlink_to(shutil.which("g++"))
    module.variables["CXX"] = str(tmp_path / "g++")


def another_working_directory(module: Module, tmp_path: Path) -> None:
    module.before = "os.chdir('/')"


def another_launcher(module: Module, tmp_path: Path) -> None:
    module.variables["FLASHINFER_CXX_LAUNCHER"] = module.variables["FLASHINFER_NVCC_LAUNCHER"] = "/usr/bin/env"


def set_variable(**variables: str) -> Callable[[Module, Path], None]:
    return lambda module, tmp_path: module.variables.update(variables)


def no_bytes_can_be_written(module: Module, tmp_path: Path) -> None:
    # As on a full file system: a file can be created, but no byte can be written.
    module.before = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); sys.dont_write_bytecode = True"
    )


def another_torch(module: Module, tmp_path: Path) -> None:
    """Make a package that pretends to be torch 2.10.1, with the C++ library of the real one."""
    import torch

    package = tmp_path / "site" / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "2.10.1"\n')
    for library in (Path(torch.__file__).parent / "lib").iterdir():
        (package / "lib" / library.name).symlink_to(library)
    module.variables["PYTHONPATH"] = python_path(tmp_path / "site", ROOT)


HITS = {
    "touched now": with_times(time.time),
    "touched by a clock 120 s ahead": with_times(lambda: time.time() + 120),
    "touched by a clock 120 s behind": with_times(lambda: time.time() - 120),
    "mtime of a git checkout years ago": with_times(lambda: 1e9),
    "mtime zero": with_times(lambda: 0),
    "sources written again": write_the_sources_again,
    "sources moved": move_the_sources,
    "cache copied without mtimes": copy_without_times,
    "cache moved": move_the_cache,
    "another order of PATH": another_order_of_path,
    "compiler through a symlink": compiler_through_a_link,
    "another HOME": set_variable(HOME="/nowhere"),
    "another user name": set_variable(USER="somebody", LOGNAME="somebody"),
    "another working directory": another_working_directory,
    "another number of jobs": set_variable(MAX_JOBS="7"),
    "another launcher": another_launcher,
    "another verbosity": set_variable(FLASHINFER_JIT_VERBOSE="1", FLASHINFER_LOGGING_LEVEL="debug"),
    "another torch": another_torch,
    "not a byte can be written": no_bytes_can_be_written,
}


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("change", HITS.values(), ids=HITS)
def test_hit(module, change, tmp_path):
    first, _ = module.ask()
    assert module.compilers() == 1
    change(module, tmp_path)
    again, _ = module.ask()
    assert module.compilers() == 1 and again.name == first.name and again.exists()


@pytest.mark.parametrize("tools", ["PATH", "PATH and CXX"])
def test_hit_without_any_tool(module, tools):
    first, started = module.ask()
    assert started > 0
    module.variables |= {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"} | (
        {"CXX": "/nowhere/g++"} if "CXX" in tools else {}
    )
    assert module.ask() == (first, 0)


@needs_nvcc
def test_hit_of_cuda_without_any_tool_and_through_a_link(module, tmp_path):
    """The toolkit is used through a symlink, and then without compiler, ninja and CUDA."""
    home = Path(shutil.which("nvcc")).parent.parent
    (tmp_path / "cuda").symlink_to(home)
    module.write(CUDA_FILES)
    module.variables["CUDA_HOME"] = str(home)
    first, _ = module.ask()
    count = module.compilers()
    module.variables["CUDA_HOME"] = str(tmp_path / "cuda")
    assert module.ask() == (first, 0) and module.compilers() == count
    module.variables |= {"PATH": "/nowhere", "CUDA_HOME": None}
    assert module.ask() == (first, 0)


def test_hit_of_another_user_in_a_read_only_workspace(module, tmp_path):
    """Root bakes the workspace into an image, and any user uses it."""
    first, _ = module.ask()
    subprocess.run(["chmod", "-R", "a+rX,a-w", str(tmp_path / "workspace"), str(module.folder)], check=True)
    if os.geteuid() == 0:
        for folder in [tmp_path, *tmp_path.parents][:-1]:
            folder.chmod(folder.stat().st_mode | 0o055)
        module.before = "os.setgid(12345); os.setuid(12345)"
    try:
        module.variables["HOME"] = "/nowhere"
        assert module.ask() == (first, 0) and module.compilers() == 1
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(tmp_path / "workspace"), str(module.folder)], check=True)


FAMILY = """
    import sys
    from flashinfer.jit.modules.quantization import gen_quantization_module
    import flashinfer
    assert flashinfer.__file__.startswith(sys.argv[1]), flashinfer.__file__
    print(gen_quantization_module("cpu").build().path)
"""


def test_hit_after_reinstalling_and_moving_the_package(python, tmp_path, compilers_started):
    """A wheel is unpacked with new times, unpacked again, and its virtual environment is moved."""

    def install(place: Path) -> str:
        shutil.rmtree(place, ignore_errors=True)
        ignore = shutil.ignore_patterns("__pycache__", "data")
        for part in ("flashinfer", "csrc", "include"):
            shutil.copytree(ROOT / part, place / part, copy_function=shutil.copyfile, ignore=ignore)
        return python(FAMILY, str(place), PYTHONPATH=python_path(place)).stdout

    first = install(tmp_path / "venv")
    count = compilers_started()
    assert count == 2 and install(tmp_path / "venv") == first
    assert install(tmp_path / "moved") == first and compilers_started() == count


def interpreters() -> list[str]:
    """Return other Pythons on PATH. A name may be a shim of a version that is switched off."""
    found = [path for minor in range(10, 20) if (path := shutil.which(f"python3.{minor}"))]
    say = "import sys; print(sys.version_info[:2])"
    done = {path: subprocess.run([path, "-c", say], capture_output=True, text=True) for path in found}
    return [
        path for path, one in done.items() if one.returncode == 0 and one.stdout.strip() != str(sys.version_info[:2])
    ]


@pytest.mark.parametrize("interpreter", interpreters())
def test_hit_of_another_python(module, interpreter, tmp_path):
    """The key is the same. The next test checks that no library needs libpython."""
    first, _ = module.ask()
    program = (
        "import sys; sys.dont_write_bytecode = True\nfrom flashinfer.jit import gen_jit_spec\n"
        f"print(gen_jit_spec('tiny', [{str(module.source)!r}]).probe().where)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([interpreter, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.strip() == str(first), done.stderr


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_elsewhere(place):
    module, _, name = place.partition(":")
    assert f"def {name}(" in (Path(__file__).parent / f"{module}.py").read_text()


# Changes that must miss.


def edit(which: str, keep_time: bool = False, to: float | None = None) -> Callable[[Module, Path], None]:
    """Return a function that changes one byte of a file without changing its length."""

    def change(module: Module, tmp_path: Path) -> None:
        path = getattr(module, which)
        status = path.stat()
        text = path.read_text()
        path.write_text(text.replace("42", "43") if which == "header" else text.replace("answer", "answes"))
        assert path.stat().st_size == status.st_size and path.read_text() != text
        if keep_time:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif to is not None:
            os.utime(path, (to, to))

    return change


def option(**options: object) -> Callable[[Module, Path], None]:
    return lambda module, tmp_path: module.options.update(options)


def another_compiler(module: Module, tmp_path: Path) -> None:
    """Make a program that compiles like the real compiler but reports another version."""
    for name, variable in (("g++", "CXX"), ("nvcc", "FLASHINFER_NVCC")):
        if (real := shutil.which(name)) is not None:
            script = tmp_path / name
            says = "Cuda compilation tools, release 99.9, V99.9.1" if name == "nvcc" else "g++ (vendor) 99.9.1"
            script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{says}" && exit\nexec {real} "$@"\n')
            script.chmod(0o755)
            module.variables[variable] = str(script)


def another_variant(module: Module, tmp_path: Path) -> None:
    """Same module and file name, another body in another folder, with the same time."""
    module.folder = tmp_path / "of somebody else"
    module.write({name: text.replace("42", "7") for name, text in module.files.items()})


MISSES = {
    "a byte of a source": edit("source"),
    "a byte of a source, its mtime restored": edit("source", keep_time=True),
    "a byte of a source, its mtime long ago": edit("source", to=0),
    "a byte of an own header": edit("header"),
    "a byte of an own header, its mtime restored": edit("header", keep_time=True),
    "a byte of an own header, its mtime long ago": edit("header", to=0),
    "a flag": option(extra_cflags=["-O1"], extra_cuda_cflags=["-O1"]),
    "a define": option(extra_cflags=["-DNEW=1"], extra_cuda_cflags=["-DNEW=1"]),
    "a link flag": option(extra_ldflags=["-lm"]),
    "a configuration": option(config={"HEAD_DIM": 128}),
    "FLASHINFER_EXTRA_CFLAGS": set_variable(FLASHINFER_EXTRA_CFLAGS="-DNEW=1"),
    "FLASHINFER_EXTRA_LDFLAGS": set_variable(FLASHINFER_EXTRA_LDFLAGS="-lm"),
    "FLASHINFER_JIT_DEBUG": set_variable(FLASHINFER_JIT_DEBUG="1"),
    "another compiler": another_compiler,
    "another arch": set_variable(FLASHINFER_CPU_ARCH="x86-64", FLASHINFER_CUDA_ARCH_LIST="9.0a"),
    "a variant with another body": another_variant,
}
CUDA_MISSES = ["a byte of a source, its mtime restored", "a byte of an own header, its mtime restored", "a define",
               "another compiler", "another arch", "a variant with another body"]  # fmt: skip


@pytest.mark.slow_beyond(7)
@pytest.mark.parametrize("change", MISSES.values(), ids=MISSES)
def test_miss(module, change, tmp_path):
    first, _ = module.ask()
    assert module.compilers() == 1
    change(module, tmp_path)
    again, _ = module.ask()
    assert module.compilers() == 2 and again != first


@needs_nvcc
def test_miss_of_cuda(module, tmp_path):
    """Changes accumulate, because compiling CUDA takes long."""
    module.write(CUDA_FILES)
    module.variables["FLASHINFER_EXTRA_CUDAFLAGS"] = None
    seen = [module.ask()[0]]
    for name in few(CUDA_MISSES, 2):
        MISSES[name](module, tmp_path)
        seen.append(module.ask()[0])
        assert len(set(seen)) == len(seen) == module.compilers(), name
    module.variables["FLASHINFER_EXTRA_CUDAFLAGS"] = "-DFROM_OUTSIDE"
    assert module.ask()[0] not in seen
