"""Layout: names correspond, each header compiles alone, layers look downward only, files are short."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest

import flashinfer
from flashinfer.jit.machine.target import CPU_LEVELS, Target, native_level
from flashinfer.jit.modules import Matrix, families, family
from flashinfer.jit.modules._family import kernels_of

from ..support.headers import chains, compile_each, included, includes

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include" / "flashinfer"
SCREEN = 60

# Layer of include/flashinfer, by directory -> layers that it may include: itself and layers below.
LAYERS = {
    "common": {"common"},
    "attention": {"common", "attention"},
    "cpu/simd": {"common", "cpu/simd"},
    "cpu": {"common", "cpu/simd", "cpu"},
    "cpu/attention": {"common", "attention", "cpu/simd", "cpu", "cpu/attention"},
    "cpu/delta_rule": {"common", "cpu/simd", "cpu", "cpu/delta_rule"},
    "cpu/sampling": {"common", "cpu/simd", "cpu", "cpu/sampling"},
    "cuda/ptx": {"common", "cuda/ptx"},
    "cuda/tile": {"common", "cuda/ptx", "cuda/tile"},
    "cuda/host": {"common", "cuda/host"},
    "cuda": {"common", "cuda/ptx", "cuda/tile", "cuda/host", "cuda"},
    "cuda/comm": {"common", "cuda/ptx", "cuda/tile", "cuda/host", "cuda", "cuda/comm"},
    "cuda/attention": {"common", "attention", "cuda/ptx", "cuda/tile", "cuda/host", "cuda", "cuda/attention"},
    "cuda/mla": {"common", "attention", "cuda/ptx", "cuda/tile", "cuda/host", "cuda", "cuda/attention", "cuda/mla"},
    "cuda/moe": {"common", "cuda/tile", "cuda/host", "cuda/moe"},
    "cuda/delta_rule": {"common", "cuda/ptx", "cuda/tile", "cuda/host", "cuda", "cuda/delta_rule"},
    "cuda/delta_rule/step": {"common", "cuda/tile", "cuda/host", "cuda/delta_rule", "cuda/delta_rule/step"},
    "cuda/delta_rule/recurrent": {
        *("common", "cuda/tile", "cuda/host"),
        *("cuda/delta_rule", "cuda/delta_rule/step", "cuda/delta_rule/recurrent"),
    },
    "cuda/delta_rule/chunk": {
        *("common", "cuda/ptx", "cuda/tile", "cuda/host"),
        *("cuda/delta_rule", "cuda/delta_rule/chunk"),
    },
}

# Macro of a conditional -> the way in which .ci/run builds both of its sides.
CONDITIONALS = {
    "__AVX2__": "x86-64 and x86-64-v3",
    "__AVX512BF16__": "x86-64-v4 and x86-64-v4+avx512bf16",
    "__AVX512BW__": "x86-64-v3 and x86-64-v4",
    "__AVX512DQ__": "x86-64-v3 and x86-64-v4",
    "__CUDACC__": "common headers, by g++ and by nvcc",
    "__CUDA_ARCH__": "8.0 and 9.0a",
    "__CUDA_ARCH_FEAT_SM90_ALL": "8.0 and 9.0a",
    "__F16C__": "x86-64 and x86-64-v3",
    "__aarch64__": "x86-64, and aarch64 by tests/cpu",
    "__clang__": "g++, and clang++ by modules of its own and by tests/cpu",
    "FLASHINFER_AVX2": "x86-64 and x86-64-v3",
    "FLASHINFER_AVX512": "x86-64-v3 and x86-64-v4",
    "FLASHINFER_BINDING": "bindings and kernels",
    "FLASHINFER_CUDA": "bindings of both backends",
    "FLASHINFER_DEBUG": "modules of FLASHINFER_JIT_DEBUG=0 and 1",
    "FLASHINFER_NEON": "x86-64, and aarch64 by tests/cpu",
    "FLASHINFER_BUILTIN_VARIANTS": "modules of the library's variants and of users'",
    "FLASHINFER_PART": "every part of a dispatching module",
    "FLASHINFER_PORTABLE": "x86-64 and x86-64-v3",
}

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_x86 = pytest.mark.skipif(native_level() == "generic", reason="levels of x86-64")


def headers(*layers: str) -> list[Path]:
    return sorted({path for layer in layers for path in (INCLUDE / layer).rglob("*.*h")})


def sources() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())


def layer_of(name: str) -> str:
    folder = os.path.dirname(name)
    return next(layer for layer in sorted(LAYERS, key=len, reverse=True) if f"{folder}/".startswith(f"{layer}/"))


CXX = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"]
# Only to PTX and for one arch: host and device code are parsed, but not optimised.
NVCC = ["nvcc", "-std=c++17", "-ptx", "-arch=compute_90a", "-x", "cu", "-o", os.devnull]


@pytest.fixture
def passed(pytestconfig: pytest.Config) -> Path | None:
    """Return the file with the digests of headers that compiled in earlier runs."""
    cache = getattr(pytestconfig, "cache", None)  # its plugin may be off
    return None if cache is None else Path(cache.mkdir("headers"))


@needs_gcc
@needs_x86
@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("level", [level for level in CPU_LEVELS if level != "x86-64-v2"])
def test_each_cpu_header_compiles_by_itself(level, passed):
    """All headers for x86-64, those of cpu/ for other levels, for AVX512-BF16 those that test for it."""
    paths = headers("cpu", "common", "attention") if level == "x86-64" else headers("cpu")
    if level.endswith("+avx512bf16"):
        asking = {path for path in paths if "__AVX512BF16__" in path.read_text()}
        paths = [path for path in paths if asking & {path, *included(path)}]
        assert paths
    compile_each([*CXX, *Target("cpu", (level,), True).flags()], paths, passed)


@needs_nvcc
@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("chain", chains(headers("cuda", "common", "attention")), ids=lambda chain: chain[-1].name)
def test_each_cuda_header_compiles_by_itself(chain, passed):
    compile_each(NVCC, chain, passed)


@pytest.mark.parametrize(
    "command", [pytest.param(CXX, marks=needs_gcc), pytest.param(NVCC, marks=needs_nvcc)], ids=["g++", "nvcc"]
)
def test_a_header_that_needs_another_is_detected(command, tmp_path):
    header = tmp_path / "leaning.h"
    header.write_text("inline std::string text() { return {}; }\n")
    for _ in range(2):
        with pytest.raises(AssertionError, match="std"):
            compile_each(command, [header], tmp_path)


@needs_gcc
def test_a_header_needs_none_that_is_compiled_with_it(tmp_path, monkeypatch):
    """A header that compiled once is compiled again after a change in it or in its includes."""
    monkeypatch.setattr("tests.support.headers.INCLUDE", tmp_path)
    texts = {
        "low.h": "#include <cstddef>\ninline std::size_t low() { return 0; }\n",
        "leaning.h": '#include "low.h"\ninline std::size_t leaning() { return low() + text().size(); }\n',
        "text.h": '#include <string>\n#include "low.h"\ninline std::string text() { return {}; }\n',
        "high.h": '#include "text.h"\n#include "leaning.h"\ninline std::size_t high() { return leaning(); }\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text("#pragma once\n" + text)
    paths = [tmp_path / name for name in texts]
    (tmp_path / "passed").mkdir()
    with pytest.raises(AssertionError, match=r"leaning\.h.*text"):
        compile_each(CXX, paths, tmp_path / "passed")
    (tmp_path / "leaning.h").write_text('#pragma once\n#include "text.h"\n' + texts["leaning.h"])
    included.cache_clear()
    compile_each(CXX, paths, tmp_path / "passed")
    (tmp_path / "text.h").write_text("#pragma once\n")
    included.cache_clear()
    with pytest.raises(AssertionError, match="text"):
        compile_each(CXX, paths, tmp_path / "passed")


def test_all_headers_are_in_chains():
    found = chains(headers(*LAYERS))
    assert sorted(path for chain in found for path in chain) == headers(*LAYERS)
    for chain in found:
        for place, path in enumerate(chain):
            assert set(chain[:place]) <= included(path)


@pytest.mark.parametrize("path", headers(*LAYERS), ids=lambda path: str(path.relative_to(INCLUDE)))
def test_a_header_looks_downward_only(path):
    text, own = path.read_text(), layer_of(str(path.relative_to(INCLUDE)))
    assert "#pragma once" in text
    assert "#include" not in text[text.find("\nnamespace") :] or "\nnamespace" not in text, "an #include inside a body"
    for name in includes(path):
        assert not re.match(r"torch|ATen|c10|pybind11|Python\.h", name), f"{path} includes {name}: kernels see no torch"
        if name.startswith("flashinfer/"):
            assert layer_of(name.removeprefix("flashinfer/")) in LAYERS[own], f"{path} includes {name}"
        else:
            assert not (path.parent / name).exists(), (
                f"{path}: own headers are included as <flashinfer/...>, got {name}"
            )


def test_only_bindings_include_torch():
    csrc = ROOT / "csrc"
    headers = {str(path.relative_to(csrc)) for path in csrc.glob("*/*.h")}
    for path in sources():
        name = str(path.relative_to(csrc))
        sees_torch = any(one.startswith("torch/") or one in headers for one in includes(path))
        assert name in headers or sees_torch == (name in {f"{one}.cc" for one in families()}), path


def test_both_sides_of_every_conditional_are_built():
    every = set()
    for path in [*headers(*LAYERS), *sources()]:
        for condition in re.findall(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(.*)$", path.read_text(), re.MULTILINE):
            asked = set(re.findall(r"[A-Za-z_]\w*", condition)) - {"defined"}
            assert asked <= set(CONDITIONALS), f"{path}: say in CONDITIONALS how both sides of {condition} are built"
            every |= asked
    assert every == set(CONDITIONALS), f"no conditional asks about {set(CONDITIONALS) - every}"


def functions_of(name: str) -> str:
    """Return the module of a family's functions, ``""`` if there is none. Collectives are in ``flashinfer.comm``."""
    places = {
        f"flashinfer/{name}.py": name,
        f"flashinfer/{name}/__init__.py": name,
        f"flashinfer/comm/{name}.py": f"comm.{name}",
    }
    return next((f"flashinfer.{module}" for file, module in places.items() if (ROOT / file).exists()), "")


@pytest.mark.parametrize("name", families())
def test_a_family_has_one_name_everywhere(name):
    """A kernel file includes a header of its kernels, named like the family or a suffix of it."""
    assert (ROOT / f"csrc/{name}.cc").exists(), f"family {name} has no binding"
    assert functions_of(name), f"family {name} has no file or package of functions"
    assert list((ROOT / "tests").glob(f"*/test_{name}.py")), f"family {name} has no tests/*/test_{name}.py"
    for kernels in kernels_of(name):
        (file,) = (ROOT / "csrc").glob(f"{name}_{kernels}.c*")
        layer = "cpu" if kernels == "cpu" else "cuda"
        used = [one for one in includes(file) if one.startswith(f"flashinfer/{layer}/")]
        parts = {part for one in used for part in Path(one).with_suffix("").parts}
        if layer == kernels:
            assert any(f"_{name}".endswith(f"_{part}") for part in parts), f"{file} includes {used}"
        assert used, f"{file} includes no kernels of {layer}/"
    for spec in family(name).aot_specs(Matrix()):
        kernels = Path(spec.sources[-1]).stem.removeprefix(f"{name}_")
        assert kernels in kernels_of(name), f"{spec.name} is made of {spec.sources[-1]}"
        assert spec.name.startswith(f"{name}_") and spec.name.endswith(f"_{kernels}")


def test_every_source_belongs_to_a_family():
    own = {f"{name}.cc" for name in families()}
    own |= {
        f"{name}_{kernels}.{'cc' if kernels == 'cpu' else 'cu'}" for name in families() for kernels in kernels_of(name)
    }
    left = {path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".cc", ".cu")} - own
    assert not left, f"csrc has files of no family: {left}"


@pytest.mark.parametrize("name", families())
def test_public_names_are_reachable_and_documented(name):
    module = importlib.import_module(functions_of(name))
    assert len(set(module.__all__)) == len(module.__all__)  # ruff sorts them
    listed = f".{name}" in flashinfer._names().values()  # those of delta_rule are another library's
    found_in = flashinfer if listed or not module.__all__ else module
    for public in module.__all__:
        assert getattr(found_in, public) is getattr(module, public)
        assert public in dir(found_in)
        assert inspect.getdoc(getattr(module, public)), f"{public} has no docstring"
    generators = {public for public in vars(family(name)) if re.fullmatch(r"gen_\w+_module", public)}
    assert generators and generators <= set(module.__all__)


@pytest.mark.parametrize("name", sorted(set(flashinfer._names().values()) - {"."}))
def test_functions_and_wrappers_are_documented(name):
    """All public files, with or without a native module. Methods count too, except partial ones."""
    module = importlib.import_module(name, "flashinfer")
    assert len(set(module.__all__)) == len(module.__all__)  # ruff sorts them
    for public in module.__all__:
        found = getattr(flashinfer, public)
        assert found is getattr(module, public) and public in dir(flashinfer)
        members = vars(found) if inspect.isclass(found) else {}
        methods = [
            x for name, x in members.items() if name[0] != "_" and not isinstance(x, (partialmethod, type(None)))
        ]
        for what in (found, *methods):
            assert inspect.getdoc(what), f"{public} has something without a docstring: {what}"


def test_no_two_modules_share_a_name():
    listed = (line for line in (ROOT / "flashinfer" / "__init__.pyi").read_text().splitlines() if " as " in line)
    names = [line.split()[3] for line in listed]
    assert len(names) == len(set(names))


def test_modules_are_found_without_torch():
    program = (
        "import flashinfer, sys; assert 'torch' not in sys.modules;"
        "print(flashinfer.sparse.__name__, flashinfer.utils.__name__, flashinfer.BatchAttention.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["flashinfer.sparse", "flashinfer.utils", "BatchAttention"], done.stderr


def test_functions_of_the_build_system_fit_on_a_screen():
    for path in (ROOT / "flashinfer" / "jit").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                assert lines <= SCREEN, f"{path}: {node.name} has {lines} lines"
