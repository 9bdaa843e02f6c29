"""Users' variants of attention as modules: what they are known by, and what their authors read when they do not compile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashinfer import jit
from flashinfer._ops.configured import load_configured
from flashinfer.errors import BuildError

from ..support.attention_modules import FLASH_SIGMOID, HOOKS, HOOKS_SCALARS, HOOKS_TENSORS, SIGMOID_PARAMETERS, sigmoid

ROOT = Path(__file__).resolve().parents[2]
BROKEN = FLASH_SIGMOID.replace("math::log2e;", "math::log3e;", 1)
BROKEN_LINE = 1 + BROKEN[: BROKEN.index("log3e")].count("\n")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def test_two_variants_of_one_name_never_meet():
    texts = [FLASH_SIGMOID, FLASH_SIGMOID.replace("1.f +", "2.f +"), FLASH_SIGMOID + "\n"]
    specs = [sigmoid(decl=text) for text in texts] + [sigmoid(dtype="float16"), sigmoid("other")]
    assert len({spec.name for spec in specs}) == len({spec.key for spec in specs}) == len(specs)
    assert all(spec.name == spec.namespace for spec in specs)
    assert sigmoid().key == specs[0].key
    decode_too = jit.gen_customize_single_decode_module(
        "sigmoid", *("float32",) * 3, 64, 64, *SIGMOID_PARAMETERS, "FlashSigmoid", FLASH_SIGMOID, backend="cpu"
    )
    assert decode_too.key != specs[0].key and decode_too.name != specs[0].name


def test_a_header_is_known_by_its_contents(tmp_path):
    places = [tmp_path / "here", tmp_path / "elsewhere" / "deep"]
    for place in places:
        place.mkdir(parents=True)
        (place / "sigmoid.h").write_text('#include "part.h"\n' + FLASH_SIGMOID)
        (place / "part.h").write_text("// one\n")
    specs = [sigmoid(decl=place / "sigmoid.h") for place in places]
    assert specs[0].key == specs[1].key and specs[0].name == specs[1].name
    assert str(tmp_path) not in str(specs[0].fields())
    assert sigmoid(decl=str(places[0] / "sigmoid.h")) == specs[0]
    for edited in ("sigmoid.h", "part.h"):
        before = sigmoid(decl=places[0] / "sigmoid.h")
        key = before.key
        (places[0] / edited).write_text((places[0] / edited).read_text() + "// more\n")
        after = sigmoid(decl=places[0] / "sigmoid.h")
        assert after.key != key and after.name != before.name


def test_a_header_that_a_text_includes_is_known_by_its_contents(tmp_path):
    (tmp_path / "own.h").write_text(FLASH_SIGMOID)
    text = f'#include "{tmp_path / "own.h"}"\n#include <vector>\n'
    before = sigmoid(decl=text)
    key = before.key
    (tmp_path / "own.h").write_text(FLASH_SIGMOID + "// more\n")
    assert sigmoid(decl=text).key != key and sigmoid(decl=text).name != before.name


def test_the_librarys_edits_leave_the_name(tmp_path, monkeypatch):
    name = sigmoid().name
    for part in ("csrc", "include"):
        shutil.copytree(ROOT / part, tmp_path / part)
    monkeypatch.setattr("flashinfer.env.data_root", lambda: str(tmp_path))
    key = sigmoid().key
    header = tmp_path / "include/flashinfer/attention/variant.h"
    header.write_text(header.read_text() + "// more\n")
    assert sigmoid().key != key and sigmoid().name == name


# --- what their authors read ---


def broken(decl: str | Path, backend: str) -> BuildError:
    half = ("float16",) * 3
    spec = jit.gen_customize_single_decode_module(
        "own", *half, 64, 64, *SIGMOID_PARAMETERS, "FlashSigmoid", decl, backend=backend
    )
    with pytest.raises(BuildError) as caught:
        load_configured(spec)
    return caught.value


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_nvcc)])
def test_an_error_is_at_the_users_line(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    error = broken(BROKEN, backend)
    at = f":{BROKEN_LINE}:" if backend == "cpu" else f"({BROKEN_LINE}): "
    assert f"own: variant_decl{at}" in error.reason and "log3e" in error.reason
    assert error.name.startswith("decode_own_") and any("log3e" in line for line in str(error).splitlines()[-20:])
    header = tmp_path / "broken.h"
    header.write_text(BROKEN)
    error = broken(header, backend)
    assert f"{header}{at}" in error.reason and "log3e" in error.reason


@needs_nvcc
def test_variants_compile_for_a_gpu(monkeypatch):
    """Every hook, and one without softmax, in the kernels of both families; how they compute is tests/attention/test_variants.py's."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    half = ("bfloat16",) * 3
    parameters = [[one[at] for one in many] for many in (HOOKS_TENSORS, HOOKS_SCALARS) for at in (0, 1)]
    artifacts = jit.build_jit_specs([
        jit.gen_customize_single_decode_module("hooks", *half, 64, 64, *parameters, "Hooks", HOOKS),
        jit.gen_customize_single_prefill_module("fa2", "hooks", *half, 64, 64, *parameters, "Hooks", HOOKS),
        jit.gen_customize_single_prefill_module(
            "fa2", "sigmoid", *half, 64, 64, *SIGMOID_PARAMETERS, "FlashSigmoid", FLASH_SIGMOID
        ),
    ])  # fmt: skip
    assert [artifact.archs for artifact in artifacts] == [("9.0",)] * 3


PROGRAM = """
import sys, torch
from pathlib import Path
from flashinfer._ops.configured import load_configured
from tests.support.attention_modules import relative_error, sigmoid, sigmoid_attention, single, tensors
q, k, v = tensors(torch.float32)
out, _ = single(load_configured(sigmoid(decl=Path(sys.argv[1]))), q, k, v, 0.125, -2.0)
print(relative_error(out, sigmoid_attention(q, k, v, 0.125, -2.0)) < 1e-5)
"""


def test_ahead_of_time(tmp_path, python):
    """Built where there is a compiler, used where there is none and the user's header lies elsewhere."""
    for place in ("build", "run"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "sigmoid.h").write_text(FLASH_SIGMOID)
    spec = sigmoid(decl=tmp_path / "build" / "sigmoid.h")
    (tmp_path / "prebuilt").mkdir()
    shutil.move(spec.build().directory, tmp_path / "prebuilt" / spec.name)
    environment = {"FLASHINFER_AOT_DIR": str(tmp_path / "prebuilt"), "FLASHINFER_DISABLE_JIT": "1"}
    header = tmp_path / "run" / "sigmoid.h"
    assert python(PROGRAM, str(header), **environment, PATH="").stdout == "True\n"
    header.write_text(FLASH_SIGMOID + "// more\n")
    assert "is not built" in python(PROGRAM, str(header), check=False, **environment).stderr
