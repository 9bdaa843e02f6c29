"""Builds do not depend on the environment or the folders of their files, in success and in bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer import env
from flashinfer.errors import BuildError
from flashinfer.jit import gen_jit_spec
from flashinfer.jit.machine.toolchain import compiler_environment

from ..support.processes import ROOT, answer, answering, python_path

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

# Each of these caused other bytes under the same key, or a failed build.
POISON = {
    "LD_RUN_PATH": "/poison/lib",
    "LIBRARY_PATH": "/poison/lib",
    "COMPILER_PATH": "/poison/bin",
    "GCC_EXEC_PREFIX": "/poison/gcc/",
    "CPATH": "/poison/include",
    "C_INCLUDE_PATH": "/poison/include",
    "CPLUS_INCLUDE_PATH": "/poison/include",
    "DEPENDENCIES_OUTPUT": "/poison/dependencies",
    "SUNPRO_DEPENDENCIES": "/poison/dependencies",
    "GCC_COMPARE_DEBUG": "-fno-inline",
    "SOURCE_DATE_EPOCH": "1000000000",
    "LDEMULATION": "elf_i386",
    "COLLECT_GCC_OPTIONS": "-poison",
    "NVCC_PREPEND_FLAGS": "-DPOISON",
    "NVCC_APPEND_FLAGS": "-DPOISON",
    "NVCC_CCBIN": "/poison/bin/g++",
    "PTXAS_FLAGS": "-O0",
    "CUDAFE_FLAGS": "--poison",
    "FATBINARY_FLAGS": "--poison",
    "NVLINK_FLAGS": "--poison",
    "CICC_PATH": "/poison/bin",
    "OPENCC_FLAGS": "-poison",
    "INCLUDES": "-I/poison",
    "LIBRARIES": "-L/poison",
    "CUDA_PATH": "/poison",
    "MAKEFLAGS": "-j100",
    "CXXFLAGS": "-DPOISON",
    "CCACHE_COMPILER": "/poison/bin/g++",
    "LANG": "de_DE.UTF-8",
}
DATED = {
    "unit.cc": """
    extern "C" __attribute__((visibility("default"))) const char* when() { return __DATE__ " " __TIME__; }
    extern "C" __attribute__((visibility("default"))) const char* where() { return __FILE__; }
    """
}
CUDA = {
    "unit.cu": """
    #include <cassert>
    #include "beside.h"
    namespace { __global__ void hidden(int* p) { assert(p != nullptr); *p = BESIDE; } }
    static __global__ void also(const char** p) { *p = __FILE__; }
    extern "C" const char* where() {
      hidden<<<1, 1>>>(nullptr);
      also<<<1, 1>>>(nullptr);
      return __FILE__;
    }
    """,
    "beside.h": "#define BESIDE 7\n",
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_nvcc)])
def files(request, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    return DATED if request.param == "cpu" else CUDA


def build(files: dict[str, str], folder: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, **options: object):
    """Build a module of files in a folder, with a workspace of its own."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(workspace))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    sources = [folder / name for name in files if not name.endswith(".h")]
    return gen_jit_spec("tiny", sources, **options).build()


# The environment.


def test_compilers_get_only_allowed_variables(make_spec, tmp_path, monkeypatch):
    """Variables of shells, batch systems and module systems are dropped."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\nenv -0 > {tmp_path}/seen\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", f"env TOLD=told {launcher}")
    unknown = {"ANYTHING": "1", "PYTHONPATH": "/poison", "LD_PRELOAD": "", "FLASHINFER_JIT_VERBOSE": "0"}
    kept = {"CCACHE_DIR": "/cache", "https_proxy": "http://proxy", "LD_LIBRARY_PATH": "/opt/gcc/lib"}
    for name, value in {**POISON, **unknown, **kept}.items():
        monkeypatch.setenv(name, value)
    assert answer(make_spec("tiny", answering(51)).build()) == 51
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().split("\0") if line)
    own = {
        "LC_ALL": "C",
        "SOURCE_DATE_EPOCH": "0",
        "NINJA_STATUS": "",
        "TOLD": "told",
        "TMPDIR": str(env.temporary_dir()),
    }
    assert kept.items() <= seen.items() and own.items() <= seen.items()
    others = seen.keys() - own.keys() - kept.keys() - {"PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE"}
    assert others <= compiler_environment().keys() and not others & (POISON.keys() | unknown.keys())


def test_no_variable_changes_a_byte(files, tmp_path, monkeypatch):
    plain = build(files, tmp_path / "src", tmp_path / "one", monkeypatch)
    for name, value in POISON.items():
        monkeypatch.setenv(name, value)
    poisoned = build(files, tmp_path / "src", tmp_path / "two", monkeypatch)
    assert plain.manifest["build_key"] == poisoned.manifest["build_key"]
    assert plain.path.read_bytes() == poisoned.path.read_bytes() and b"poison" not in plain.path.read_bytes()


def test_a_linker_that_changes_bytes_changes_the_key(files, tmp_path, monkeypatch):
    plain = build(files, tmp_path / "src", tmp_path / "one", monkeypatch)
    (tmp_path / "bin").mkdir()
    linker = tmp_path / "bin" / "ld"
    linker.write_text(
        '#!/bin/sh\ntest "$1" = --version && echo "ld of a test 1.0" && exit\n'
        f'exec {shutil.which("ld")} "$@" --build-id=0x1234\n'
    )
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    other = build(files, tmp_path / "src", tmp_path / "two", monkeypatch)
    assert plain.path.read_bytes() != other.path.read_bytes(), "the compiler starts the linker of PATH"
    assert plain.manifest["key"] == other.manifest["key"]
    assert plain.manifest["build_key"] != other.manifest["build_key"]


# Folders.


def test_two_builds_of_one_key_are_equal(files, tmp_path, monkeypatch):
    """Builds from other folders, workspaces and times give the same bytes, without a path of either."""
    one = build(files, tmp_path / "here" / "src", tmp_path / "one", monkeypatch)
    two = build(files, tmp_path / "there" / "deep" / "down", tmp_path / "other" / "two", monkeypatch)
    assert one.manifest["build_key"] == two.manifest["build_key"]
    assert one.path.read_bytes() == two.path.read_bytes()
    assert os.fsencode(tmp_path) not in one.path.read_bytes() and b"user/0/unit.c" in one.path.read_bytes()


def test_a_header_of_another_folder_is_named_as_in_the_key(tmp_path, monkeypatch):
    """One folder may contain the other, or only begin with its name."""
    files = {"unit.cc": '#include <far.h>\nextern "C" const char* where() { return far(); }\n'}
    artifacts = []
    for number, (source, include) in enumerate([("a/src", "a/src2"), ("x", "y"), ("deep/down/src", "deep")]):
        place = tmp_path / str(number)
        (place / include).mkdir(parents=True)
        (place / include / "far.h").write_text("inline const char* far() { return __FILE__; }\n")
        spec = {"extra_include_paths": [place / include]}
        artifacts.append(build(files, place / source, place / "workspace", monkeypatch, **spec))
    assert len({one.manifest["build_key"] for one in artifacts}) == 1
    assert len({one.path.read_bytes() for one in artifacts}) == 1 and b"user/1/far.h" in artifacts[0].path.read_bytes()


def test_a_debug_build_contains_no_path_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    one = build(DATED, tmp_path / "here", tmp_path / "one", monkeypatch)
    two = build(DATED, tmp_path / "there", tmp_path / "two", monkeypatch)
    assert one.path.read_bytes() == two.path.read_bytes() and os.fsencode(tmp_path) not in one.path.read_bytes()


NAMES = ["a,b", "a$b", "a b", "a=b", "a'b", 'a"b', "a;b&(c)", "a:b", "a#b", "ümläut", "a\\b", "a\udce9b"]
# Each compiler run of CUDA takes seconds: what no other character can hide stands in one name.
CUDA_NAMES = ["a,b$c d'e=f", 'a"b', "a\udce9b"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_source_below_any_folder(name, tmp_path, monkeypatch):
    """The source has a header next to it and one of another folder. The workspace is there too."""
    place = tmp_path / name
    files = answering(52)
    files["unit.cc"] = '#include "beside.h"\n#include <far.h>\n' + files["unit.cc"].replace("52", "BESIDE + FAR")
    files["beside.h"] = "#define BESIDE 50\n"
    (place / "include").mkdir(parents=True)
    (place / "include" / "far.h").write_text("#define FAR 2\n")
    artifact = build(files, place / "src", place / "workspace", monkeypatch, extra_include_paths=[place / "include"])
    assert answer(artifact) == 52 and artifact.path.is_relative_to(place)
    plain = build(
        files, tmp_path / "p" / "src", tmp_path / "p" / "w", monkeypatch, extra_include_paths=[place / "include"]
    )
    assert plain.manifest["build_key"] == artifact.manifest["build_key"]
    assert plain.path.read_bytes() == artifact.path.read_bytes()
    files["unit.cc"] += "int bad = no_such_name;\n"
    with pytest.raises(BuildError, match="'no_such_name' was not declared") as caught:
        build(files, place / "src", place / "workspace", monkeypatch, extra_include_paths=[place / "include"])
    assert f"{place}/src/unit.cc:4:" in caught.value.reason, "the user's file, by the user's name"


@needs_nvcc
@pytest.mark.parametrize("name", CUDA_NAMES, ids=ascii)
def test_a_cuda_source_below_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    place = tmp_path / name
    artifact = build(CUDA, place / "src", place / "workspace", monkeypatch)
    assert artifact.path.stat().st_size == artifact.manifest["size"] and b"user/0/unit.cu" in artifact.path.read_bytes()


PACKAGE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import flashinfer
    assert flashinfer.__file__.startswith(sys.argv[1]), flashinfer.__file__
    from flashinfer.jit.modules.quantization import gen_quantization_module
    print(gen_quantization_module(sys.argv[2]).build().path)
"""


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_nvcc)])
def test_a_package_below_any_folder(backend, python, tmp_path):
    """The bytes equal those of a package in a folder with a plain name."""
    paths = []
    for number, place in enumerate([tmp_path / "a,b$c=d e", tmp_path / "plain"]):
        for folder in ("flashinfer", "csrc", "include"):
            shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
        done = python(PACKAGE, str(place), backend, PYTHONPATH=python_path(place), FLASHINFER_EXTRA_CFLAGS="-O0",
                      FLASHINFER_CUDA_ARCH_LIST="8.0", FLASHINFER_WORKSPACE_DIR=f"{place}/workspace-{number}")  # fmt: skip
        paths.append(Path(done.stdout.strip()))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_command_prints_a_path_that_is_not_text(tmp_path):
    """The workspace's name is not UTF-8, and the terminal accepts only UTF-8."""
    program = "import sys; from flashinfer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    place = os.fsencode(tmp_path) + b"/a\xe9b"
    environment = {**os.environb, b"FLASHINFER_WORKSPACE_DIR": place, b"PYTHONPATH": os.fsencode(python_path(ROOT)),
                   b"PYTHONIOENCODING": b"utf-8:strict"}  # fmt: skip
    for command in (["doctor"], ["doctor", "--config"]):
        result = subprocess.run([sys.executable, "-c", program, *command], env=environment, capture_output=True)
        assert b"Traceback" not in result.stderr and result.returncode in (0, 1), result.stderr.decode()
        assert re.search(rb"a\\udce9b", result.stdout), result.stdout


ZIPPED = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import flashinfer
    assert flashinfer.__file__.startswith(sys.argv[1]), flashinfer.__file__
    import torch
    from flashinfer.errors import FlashInferError
    from flashinfer.jit import gen_jit_spec
    for call in (lambda: flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8)), lambda: gen_jit_spec("tiny", ["/a.cc"])):
        try:
            call()
        except FlashInferError as err:
            print(type(err).__name__, err)
"""


def test_a_package_in_an_archive_is_an_error(tmp_path, python):
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", ROOT, "flashinfer")
    done = python(ZIPPED, archive)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("archive" in line and archive in line for line in lines), done.stdout + done.stderr
