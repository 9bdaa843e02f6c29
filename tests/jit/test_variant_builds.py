"""Users' attention variants as modules: their names, and the errors that their authors read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashinfer import jit
from flashinfer._ops.configured import load_configured
from flashinfer.errors import BuildError

from ..support.attention_modules import (
    FLASH_SIGMOID,
    HOOKS,
    HOOKS_SCALARS,
    HOOKS_TENSORS,
    SIGMOID_PARAMETERS,
    compiled,
    sigmoid,
)

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def test_two_variants_of_one_name_never_meet():
    texts = [FLASH_SIGMOID, FLASH_SIGMOID.replace("1.f +", "2.f +"), FLASH_SIGMOID + "\n"]
    specs = [sigmoid(decl=text) for text in texts] + [sigmoid(dtype="float16"), sigmoid("other")]
    assert len({spec.name for spec in specs}) == len({spec.key for spec in specs}) == len(specs)
    assert all(spec.name == spec.namespace for spec in specs)
    assert sigmoid().key == specs[0].key
    decode_too = jit.gen_customize_single_decode_module(
        "sigmoid", *("float32",) * 3, 64, 64, *SIGMOID_PARAMETERS, "FlashSigmoid", FLASH_SIGMOID, device="cpu"
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


# Errors that authors read. test_variant_forms.py has compilers' messages for more mistakes.


def test_a_build_fails_at_the_users_line():
    broken = FLASH_SIGMOID.replace("math::log2e;", "math::log3e;", 1)
    with pytest.raises(BuildError) as caught:
        load_configured(sigmoid(decl=broken))
    line = 1 + broken[: broken.index("log3e")].count("\n")
    assert f"sigmoid: variant_decl:{line}:" in caught.value.reason and "log3e" in caught.value.reason
    assert caught.value.name.startswith("prefill_sigmoid_")
    assert any("log3e" in text for text in str(caught.value).splitlines()[-20:])


@needs_nvcc
@pytest.mark.parametrize("family", ["decode", "prefill"])
def test_every_hook_compiles_for_a_gpu(family, tmp_path):
    """Kernels of both families compile with a window. tests/attention/test_variants.py checks the results."""
    hooks = HOOKS.replace("window_left = kv_len", "window_left = 64")
    parameters = [[one[at] for one in many] for many in (HOOKS_TENSORS, HOOKS_SCALARS) for at in (0, 1)]
    arguments = ("hooks", *("bfloat16",) * 3, 64, 64, *parameters, "Hooks", hooks)
    if family == "decode":
        spec = jit.gen_customize_single_decode_module(*arguments, device="cuda")
    else:
        spec = jit.gen_customize_single_prefill_module("fa2", *arguments, device="cuda")
    assert not compiled(spec, spec.sources[-1], tmp_path)


PROGRAM = """
import sys, torch
from pathlib import Path
from flashinfer._ops.configured import load_configured
from tests.support.attention_modules import relative_error, sigmoid, sigmoid_attention, single, tensors
q, k, v = tensors(torch.float32)
out, _ = single(load_configured(sigmoid(decl=Path(sys.argv[1]))), q, k, v, 0.125, -2.0)
print(relative_error(out, sigmoid_attention(q, k, v, 0.125, -2.0)) < 1e-5)
"""


def test_ahead_of_time(tmp_path, python, monkeypatch):
    """A variant is built with a compiler, and used without one and with its header in another folder."""
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")  # builds fast
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
