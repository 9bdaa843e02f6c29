"""Environment variables: one definition each, a type, and an error that names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer import env
from flashinfer.errors import EnvironmentValueError, FlashInferError
from flashinfer.jit.machine.target import Target

BAD = [
    ("FLASHINFER_CUDA_ARCH_LIST", "sm_90", "not an arch such as"),
    ("FLASHINFER_CUDA_ARCH_LIST", "9.0;;x", "not an arch"),
    ("FLASHINFER_CUDA_ARCH_LIST", "Hopper", "not an arch"),
    ("TORCH_CUDA_ARCH_LIST", "Hooper", "'Hooper' is not an arch"),
    ("FLASHINFER_CPU_ARCH", "x86-64-v9", "wanted one of native"),
    ("FLASHINFER_DISABLE_JIT", "perhaps", "wanted one of 0, 1"),
    ("FLASHINFER_JIT_VERBOSE", "2", "wanted one of 0, 1"),
    ("FLASHINFER_JIT_DEBUG", "-1", "wanted one of 0, 1"),
    ("MAX_JOBS", "0", "wanted a positive number"),
    ("MAX_JOBS", "four", "wanted a positive number"),
    ("FLASHINFER_WORKSPACE_DIR", "relative/path", "wanted an absolute path"),
    ("FLASHINFER_AOT_DIR", "/a:b", "wanted absolute paths"),
    ("FLASHINFER_EXTRA_CFLAGS", "'unclosed", "wanted words"),
    ("FLASHINFER_EXTRA_CFLAGS", "-DA\n-DB", "newline"),
    ("FLASHINFER_LOGGING_LEVEL", "loud", "wanted one of debug"),
]


@pytest.mark.parametrize("name, value, message", BAD)
def test_a_bad_value_names_the_variable(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    variable = next(variable for variable in env.VARIABLES if variable.name == name)
    with pytest.raises(EnvironmentValueError, match=message) as caught:
        variable.get()
    assert (
        name in str(caught.value) and isinstance(caught.value, FlashInferError) and isinstance(caught.value, ValueError)
    )


@pytest.mark.parametrize("text", ["9.0a 8.0", "8.0;9.0a", "9.0A,8.0,8.0", " 8.0 ; 9.0a "])
def test_archs(text):
    assert env.parse_cuda_archs(text) == ("8.0", "9.0a")


def test_archs_sort_by_number():
    assert env.parse_cuda_archs("10.0f 9.0a 8.0+ptx 12.0") == ("8.0+PTX", "9.0a", "10.0f", "12.0")


def test_defaults(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert env.WORKSPACE_DIR.get() == Path("/home/somebody/.cache/flashinfer")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/base")
    assert env.WORKSPACE_DIR.get() == Path("/base/.cache/flashinfer")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert env.CUDA_ARCH_LIST.get() == ("8.6",)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    assert env.CUDA_ARCH_LIST.get() == ("9.0a",)
    assert env.EXTRA_CFLAGS.get() == () and env.CPU_ARCH.get() is None and env.MAX_JOBS.get() >= 1
    assert env.aot_dirs()[-1] == env.default_aot_dir()


def test_read_when_needed(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AOT_DIR", "/one:/two")
    assert env.aot_dirs()[:2] == (Path("/one"), Path("/two"))
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-DA='x y' -O2")
    assert env.EXTRA_CFLAGS.get() == ("-DA=x y", "-O2")


TORCH_LISTS = [
    "Hopper", "Ampere;Ada", "8.0 9.0+PTX", "Turing", "Blackwell", "Volta;7.5", "Ampere+Tegra", "Kepler+Tesla Maxwell",
    "Pascal", "Maxwell+Tegra", "Volta+Tegra", "8.0;8.6+PTX", "9.0a", "10.0a;12.0",
]  # fmt: skip


@pytest.mark.parametrize("text", TORCH_LISTS)
def test_torchs_list_is_read_as_by_torch(text, monkeypatch):
    """The flags are those of torch's own extensions."""
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert sorted(set(Target("cuda", env.TORCH_CUDA_ARCH_LIST.get(), False).flags())) == _get_cuda_arch_flags()


@pytest.mark.parametrize("text", ["native", "Common", "All", "Auto"])
def test_lists_that_leave_the_choice_to_torch_mean_the_visible_gpus(text, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert env.CUDA_ARCH_LIST.get() == ()
