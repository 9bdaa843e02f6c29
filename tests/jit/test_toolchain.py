"""Tools: found in every supported location, asked once, and reported in one sentence if missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from flashinfer.errors import ToolchainError
from flashinfer.jit.machine import toolchain
from flashinfer.jit.machine.toolchain import (
    find_cxx,
    find_ninja,
    find_nvcc,
    find_python,
    find_toolchain,
    find_torch,
    identity_of,
    version_of,
)


def fake(path: Path, says: str, log: Path | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho started >> {log or '/dev/null'}\nprintf '%s\\n' '{says}'\n")
    path.chmod(0o755)
    return str(path)


def test_CXX_names_the_compiler(tmp_path, monkeypatch):
    mine = fake(tmp_path / "mine", "mine 1.0")
    assert Path(find_cxx()).name in ("g++", "c++")
    monkeypatch.setenv("CXX", mine)
    assert find_cxx() == mine


@pytest.mark.parametrize("variable, find", [("CXX", find_cxx), ("FLASHINFER_NVCC", find_nvcc)])
def test_a_named_tool_that_does_not_exist_is_an_error(variable, find, monkeypatch):
    monkeypatch.setenv(variable, "/nowhere/tool")
    with pytest.raises(ToolchainError, match=f"{variable}: '/nowhere/tool' is not a program"):
        find()


NAMED = {
    "CXX": find_cxx,
    "FLASHINFER_NVCC": find_nvcc,
    "FLASHINFER_CXX_LAUNCHER": lambda: find_toolchain("cpu"),
    "FLASHINFER_NVCC_LAUNCHER": lambda: find_toolchain("cuda"),
}


@pytest.mark.parametrize("variable", [*NAMED, "CUDA_HOME"])
@pytest.mark.parametrize(
    "what, mode, refusal",
    [("program", 0o757, "can be written by everybody"), ("folder", 0o777, "can be written by everybody"),
     ("folder", 0o1777, "can be written by everybody"), ("program", 0o775, "can be written by group 54321")],
)  # fmt: skip
def test_a_program_that_others_can_write_is_not_run(variable, what, mode, refusal, tmp_path, monkeypatch):
    """A program or link that others can write is refused, and accepted once its mode is right."""
    log = tmp_path / "log"
    program = Path(fake(tmp_path / "home/bin/nvcc", "x 1.0", log))
    changed = program if what == "program" else program.parent
    (tmp_path / "link").symlink_to(program)
    if "group" in refusal:
        if os.geteuid() != 0:
            pytest.skip("giving a file to another group takes root")
        os.chown(program, -1, 54321)
    if variable.startswith("FLASHINFER_NVCC_L"):
        monkeypatch.setenv("FLASHINFER_NVCC", fake(tmp_path / "other/nvcc", "nvcc 1.0"))
    for path in [tmp_path / "home"] if variable == "CUDA_HOME" else [program, tmp_path / "link"]:
        monkeypatch.setenv(variable, str(path))
        find = NAMED.get(variable, find_nvcc)
        changed.chmod(mode)
        with pytest.raises(ToolchainError, match=rf"{variable}: '.*' is not run: .*{refusal}"):
            find()
        changed.chmod(0o755)
        assert find()
    assert not log.exists(), "it was never started"


def test_a_program_of_another_user_is_not_run(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("giving a file away takes root")
    program = fake(tmp_path / "cc", "cc 1.0")
    os.chown(program, 12345, -1)
    monkeypatch.setenv("CXX", program)
    with pytest.raises(ToolchainError, match="belongs to user 12345"):
        find_cxx()


def test_a_launcher_is_found_and_keeps_its_arguments(tmp_path, monkeypatch):
    launcher = fake(tmp_path / "bin/cache me", "x")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "'cache me' --dir 'a b'")
    assert find_toolchain("cpu").cxx_launcher == (launcher, "--dir", "a b")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "no-such-launcher")
    with pytest.raises(ToolchainError, match="FLASHINFER_CXX_LAUNCHER: 'no-such-launcher' is not a program"):
        find_toolchain("cpu")


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """Simulate an interpreter inside another program: no folder of its own has a Python."""
    for name in ("prefix", "exec_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))


@pytest.mark.parametrize("executable", ["/opt/app/server", "/opt/python/app", "/opt/pythonic", "", None])
def test_python_is_this_one_unless_it_is_part_of_another_program(executable, tmp_path, monkeypatch, embedded):
    """The program would run itself.

    So the order is this interpreter's folders, then ``PATH``, this version first.
    """
    assert find_python() == sys.executable
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ToolchainError, match=r"cannot find python: .* install python3\.\d+, in PATH"):
        find_python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for place in ("path/python3", f"path/{version}", "base_exec_prefix/bin/python3", f"prefix/bin/{version}"):
        program = fake(tmp_path / place, "x")
        assert find_python() == program


@pytest.mark.parametrize("executable", ["", None])
def test_ninja_without_an_executable(executable, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    assert os.path.basename(find_ninja()) == "ninja"


def test_a_truncated_answer_is_asked_for_again(tmp_path, monkeypatch, workspace):
    compiler = fake(tmp_path / "cc", "cc (vendor) 1.0")
    for text in ("", '["(vendor', "[]", "3", '"(ven"'):
        monkeypatch.setattr(toolchain, "_versions", {})
        assert version_of(compiler) == "(vendor) 1.0"
        (answer,) = (workspace / "answers").iterdir()
        answer.write_text(text)


def test_a_launcher_in_CXX(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(ToolchainError, match="FLASHINFER_CXX_LAUNCHER"):
        find_cxx()


def test_no_compiler_anywhere(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ToolchainError, match=r"cannot find a C\+\+ compiler: looked in PATH=/nowhere; install g\+\+ 11 .* or set CXX"
    ):
        find_cxx()


def test_nvcc_of_CUDA_HOME_then_path(tmp_path, monkeypatch):
    home = fake(tmp_path / "home/bin/nvcc", "x")
    path = fake(tmp_path / "path/nvcc", "x")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    assert find_nvcc() == path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_nvcc() == home
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match="CUDA_HOME: .* is not a program"):
        find_nvcc()


def test_nvcc_of_a_pip_package(tmp_path, monkeypatch):
    found = fake(tmp_path / "site/nvidia/cu13/bin/nvcc", "x")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [name for name in sys.modules if name == "nvidia" or name.startswith("nvidia.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_nvcc() == found


def test_ninja_next_to_the_interpreter_without_a_path(monkeypatch):
    if not (Path(sys.executable).parent / "ninja").exists():
        pytest.skip("this interpreter's environment has no ninja package")
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(find_ninja()).parent == Path(sys.executable).parent


def test_no_ninja(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ToolchainError, match=r"cannot find ninja: looked in .*; install ninja \(pip install ninja\)"):
        find_ninja()


def test_a_compiler_is_asked_once_per_version(tmp_path, monkeypatch):
    log = tmp_path / "log"
    compiler = fake(tmp_path / "cc", "cc (vendor) 1.0", log)
    for _ in range(3):
        monkeypatch.setattr(toolchain, "_versions", {})  # as in a new process
        assert version_of(compiler) == "(vendor) 1.0"
    assert len(log.read_text().splitlines()) == 1
    fake(tmp_path / "cc", "cc (vendor) 2.0", log)
    assert version_of(compiler) == "(vendor) 2.0"


def test_the_assembler_and_the_linker_of_path_count(tmp_path, monkeypatch):
    compiler = fake(tmp_path / "gcc/g++", "g++ (vendor) 1.0")
    for name in ("as", "ld"):
        fake(tmp_path / "gcc" / name, f"{name} (vendor) 2.0")
        fake(tmp_path / "conda" / name, f"{name} (other) 3.0")
    want = {"cxx": "(vendor) 1.0", "nvcc": None, "as": "(vendor) 2.0", "ld": "(vendor) 2.0"}
    monkeypatch.setenv("PATH", f"{tmp_path}/gcc{os.pathsep}{tmp_path}/conda")
    assert identity_of(compiler, None) == want
    monkeypatch.setenv("PATH", f"{tmp_path}/conda{os.pathsep}{tmp_path}/gcc")
    fake(tmp_path / "conda/ld", "ld (other) 3.1.0")
    assert identity_of(compiler, None) == want | {"as": "(other) 3.0", "ld": "(other) 3.1.0"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert identity_of(compiler, None) == want | {"as": None, "ld": None}


def test_a_script_is_identified_by_the_programs_it_names(tmp_path):
    inner = fake(tmp_path / "real/cc", "cc 1.0")
    outer = tmp_path / "cc"
    outer.write_text(f'#!/bin/sh\nexec {inner} "$@"\n')
    outer.chmod(0o755)
    assert version_of(str(outer)) == "1.0"
    fake(tmp_path / "real/cc", "cc 2.0.0")
    assert version_of(str(outer)) == "2.0.0"


def test_names_do_not_count(tmp_path):
    assert version_of(fake(tmp_path / "a", "g++ (X) 12.2")) == version_of(fake(tmp_path / "b", "c++ (X) 12.2"))
    assert version_of(
        fake(tmp_path / "n", "nvcc: NVIDIA\nCuda compilation tools, release 13.0, V13.0.88\nBuild x")
    ).startswith("Cuda comp")


def test_a_compiler_that_fails(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ToolchainError, match="--version does not answer: broken"):
        version_of(str(broken))


def test_torch_has_the_abi_that_modules_are_compiled_for():
    assert torch.compiled_with_cxx11_abi() and b"__cxx1112basic_string" in (find_torch() / "lib/libc10.so").read_bytes()


def test_torch_is_found_without_importing_it():
    assert find_torch() == Path(torch.__file__).parent


def test_no_torch(monkeypatch):
    find_torch.cache_clear()
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="torch is not installed"):
        find_torch()
    find_torch.cache_clear()


@pytest.mark.parametrize("backend, lacks", [("cpu", "cannot find a C\\+\\+ compiler"), ("cuda", "no GPU is visible")])
def test_a_missing_tool_is_reported_with_the_module(backend, lacks, make_spec, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("flashinfer.jit.machine.target.visible_gpus", tuple)
    with pytest.raises(ToolchainError, match=f"module 'wanted' cannot be built: {lacks}"):
        make_spec("wanted", backend=backend).build()


def test_a_compiler_is_found_without_asking_for_the_interpreters_folders(monkeypatch):
    """Each lookup finds the compiler, and sysconfig would double the time of a hit."""
    monkeypatch.setattr(toolchain, "_interpreter_folders", lambda: pytest.fail("sysconfig was asked"))
    assert Path(find_cxx()).name in ("g++", "c++")
