"""The text of ninja files, word by word, and ninja's reading of it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flashinfer import env
from flashinfer.jit.machine.target import Target
from flashinfer.jit.machine.toolchain import Toolchain, find_ninja
from flashinfer.jit.modules.norm import gen_norm_module
from flashinfer.jit.ninja import escape, render_graph, render_spec, words

CPU = Target("cpu", ("x86-64-v3",), True)
CUDA = Target("cuda", ("8.0+PTX", "9.0a"), True)


def tools(backend: str, torch: Path, launcher: tuple[str, ...] = ()) -> Toolchain:
    nvcc = "/cuda/bin/nvcc" if backend == "cuda" else None
    return Toolchain("/usr/bin/g++", nvcc, "/bin/ninja", torch, launcher, launcher)


@pytest.fixture
def torch(tmp_path, monkeypatch):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libc10.so").write_bytes(b"__cxx1112basic_string")
    return tmp_path / "torch"


def test_spec_file_cpu():
    root = env.data_root()
    assert render_spec(gen_norm_module("cpu"), CPU, "norm_cpu") == (
        "# norm_cpu: cpu, x86-64-v3\n"
        "module = norm_cpu\n"
        "cflags = -std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Werror=return-type -O3 -march=x86-64-v3"
        f" -DFLASHINFER_MODULE=norm_cpu -DFLASHINFER_NAMESPACE=flashinfer -DFLASHINFER_CPU=1 -Inorm_cpu -I{root}/include -I{root}/csrc"
        f" -ffile-prefix-map=norm_cpu/=./ -ffile-prefix-map={root}/csrc/=./user/0/ -ffile-prefix-map={root}/=./\n"
        "ldflags = -Lnorm_cpu\n"
        "\n"
        f"build norm_cpu/norm.o: cxx {root}/csrc/norm.cc\n"
        "  cflags = $cflags -O1\n"
        f"build norm_cpu/norm_cpu.o: cxx {root}/csrc/norm_cpu.cc\n"
        "build norm_cpu/norm_cpu.so: link_cpu norm_cpu/norm.o norm_cpu/norm_cpu.o\n"
    )


def test_spec_file_cuda():
    text = render_spec(gen_norm_module("cuda"), CUDA, "key/norm_cuda")
    assert (
        "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_80,code=compute_80 -gencode=arch=compute_90a,code=sm_90a"
        in text
    )
    assert f"build key/norm_cuda/norm_cuda.o: nvcc {env.data_root()}/csrc/norm_cuda.cu" in text
    assert "build key/norm_cuda/libtorch_cuda.so: stub" in text
    assert (
        "build key/norm_cuda/norm_cuda.so: link_cuda key/norm_cuda/norm.o key/norm_cuda/norm_cuda.o || key/norm_cuda/libtorch_cuda.so\n"
        in text
    )


def test_spec_file_of_parts():
    """Each part of a split source is an object of its own, compiled with its part number."""
    spec = replace(gen_norm_module("cuda").covering({"dtype": ["float16", "bfloat16"]}), split=True)
    text = render_spec(spec, CUDA, "norm_cuda")
    for part in range(2):
        assert (
            f"build norm_cuda/norm_cuda.{part}.o: nvcc {env.data_root()}/csrc/norm_cuda.cu\n"
            f"  cuda_cflags = $cuda_cflags -DFLASHINFER_PART={part} -Xcudafe=--orig_src_path_name=norm_cuda.{part}.cu\n"
        ) in text
    assert "norm_cuda/norm_cuda.so: link_cuda norm_cuda/norm.o norm_cuda/norm_cuda.0.o norm_cuda/norm_cuda.1.o" in text


def test_graph_file(torch):
    spec = gen_norm_module("cpu")
    assert render_graph({"one/norm_cpu": spec, "two/norm_cpu": spec}, tools("cpu", torch, ("ccache",))) == (
        "ninja_required_version = 1.5\n"
        "rule cxx\n"
        "  command = ccache /usr/bin/g++ -MMD -MF $out.d -D_GLIBCXX_USE_CXX11_ABI=1 -DTORCH_TARGET_VERSION=0x020a000000000000"
        f" -isystem {torch}/include -ffile-prefix-map={torch}/=torch/ $cflags -c $in -o $out\n"
        "  description = $module $command\n"
        "  depfile = $out.d\n"
        "rule link_cpu\n"
        f"  command = /usr/bin/g++ -shared -L{torch}/lib -Wl,--no-as-needed -o $out $in -ltorch_cpu $ldflags\n"
        "  description = $module $command\n"
        "subninja one/norm_cpu/build.ninja\n"
        "subninja two/norm_cpu/build.ninja\n"
        "default one/norm_cpu/norm_cpu.so two/norm_cpu/norm_cpu.so\n"
    )
    cuda = render_graph({"norm_cuda": gen_norm_module("cuda")}, tools("cuda", torch))
    assert "rule nvcc\n  command = /cuda/bin/nvcc -ccbin /usr/bin/g++ -objtemp -MMD -MF $out.d" in cuda
    assert "rule link_cuda\n  command = /cuda/bin/nvcc -ccbin /usr/bin/g++ -shared -nodlink -cudart=static" in cuda
    assert "-Wl,-soname,libtorch_cuda.so" in cuda


def test_graph_file_with_a_runner(torch):
    """The runner precedes every command. Messages show the command without it."""
    spec = gen_norm_module("cuda")
    plain = render_graph({"d/norm_cuda": spec}, tools("cuda", torch)).splitlines()
    text = render_graph(
        {"d/norm_cuda": spec}, tools("cuda", torch), ["py thon", "-S", "unit.py"], "log dir"
    ).splitlines()
    assert text[:2] == ["ninja_required_version = 1.5", "builddir = log$ dir"]
    prefix = "  command = exec 'py thon' -S unit.py $out -- "
    commands = [line for line in text if line.startswith("  command")]
    assert len(commands) == 5 and all(line.startswith(prefix) for line in commands)
    assert [line.replace(prefix, "  command = ") for line in text if "builddir" not in line] == plain


def test_same_in_same_out():
    texts = {render_spec(gen_norm_module("cpu"), CPU, "norm_cpu") for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("path", ["plain", "with space", "a:b", "a$b", "a b$c:d", "umläut"])
def test_escaped_paths_survive_ninja(path, tmp_path):
    folder = tmp_path / path
    folder.mkdir()
    (folder / "in put").write_text("x")
    source, made = folder / "in put", folder / "out$put"
    (tmp_path / "build.ninja").write_text(
        f"rule copy\n  command = cp $in $out\nbuild {escape(str(made))}: copy {escape(str(source))}\n"
    )
    subprocess.run([find_ninja(), "-C", str(tmp_path)], check=True, capture_output=True)
    assert made.read_text() == "x"


@pytest.mark.parametrize("word", ["plain", "two words", "$HOME", "it's", 'a"b', "a;b&c|d", "$(touch x)", "*"])
def test_words_reach_the_command_unchanged(word, tmp_path):
    (tmp_path / "build.ninja").write_text(
        f"rule show\n  command = {words(['printf', '%s', word])} > $out\nbuild out: show\n"
    )
    subprocess.run([find_ninja(), "-C", str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / "out").read_text() == word
    assert sorted(os.listdir(tmp_path)) == [".ninja_log", "build.ninja", "out"] or word == "plain"
