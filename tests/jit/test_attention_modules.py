"""Attention modules: two forms of one source, the choice among them, and users' variants."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from flashinfer import jit
from flashinfer._ops.configured import has_dispatching_module
from flashinfer.jit.modules._attention import attention_spec, dispatching_spec

from ..support.attention_modules import compiled

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("decode", "prefill")
COVERAGE = {
    "dtypes": ["float16:float16:float16", "bfloat16:float8_e4m3fn:bfloat16"],
    "head_dims": ["64"],
    "variants": ["default"],
}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

COMPARE = """
import sys, torch
from flashinfer.jit.load import load
from flashinfer.jit.modules._attention import attention_spec, dispatching_spec
from tests.support.attention_modules import NONE, single, tensors
from tests.jit.test_attention_modules import COVERAGE
family, device, *every = sys.argv[1:]
several = load(dispatching_spec(family, device, COVERAGE))
for dtypes in every:
    one = load(attention_spec(family, device, dtypes, "64", "default"))
    q_type, kv_type, _ = (getattr(torch, name) for name in dtypes.split(":"))
    q, k, v = tensors(torch.float32, "64", 1 if family == "decode" else 37, device=device)
    q, k, v = q.to(q_type), k.to(kv_type), v.to(kv_type)
    first, second = (single(module, q, k, v, *NONE, 0.125, 0.0) for module in (one, several))
    assert one is not several and not first[0].isnan().any() and first[0].any()
    assert all(torch.equal(a, b) for a, b in zip(first, second)), dtypes
half = [x.half() for x in tensors(torch.float32, "64", device=device)]
wide = [x.half() for x in tensors(torch.float32, "128", device=device)]
other = [x.bfloat16() for x in half] if q_type == torch.float16 else half
for module, inputs, variant in ((several, [x.bfloat16() for x in half], 0), (one, other, 0), (several, wide, 0), (several, half, 2)):
    try:
        single(module, *inputs, *NONE, 1.0, 0.0, variant=variant)
    except RuntimeError as err:
        print(str(err).splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_give_the_same_bits(family, device, python):
    """A dispatching module and specialised ones agree.

    A configuration without a kernel is the caller's error.
    """
    every = COVERAGE["dtypes"]
    other = "bfloat16" if every[-1].startswith("float16") else "float16"
    assert python(COMPARE, family, device, *every).stdout.splitlines() == [
        "ValueError: dtypes: got bfloat16:bfloat16:bfloat16, this module was built for"
        " bfloat16:float8_e4m3fn:bfloat16, float16:float16:float16",
        f"ValueError: dtypes: got {other}:{other}:{other}, this module was built for {every[-1]}",
        "ValueError: head_dims: got 128, this module was built for 64",
        "ValueError: variants: got alibi, this module was built for default",
    ]


PARTS = """
#include <flashinfer/{header}>
#include "attention_config.h"
#include <type_traits>
using namespace flashinfer;
constexpr auto kPart = kParts[FLASHINFER_PART];
static_assert(std::get<0>(kPart) == (std::is_same_v<DTypeQ, half_t> ? DType::kFloat16 : DType::kBFloat16));
static_assert(std::get<1>(kPart) == (std::is_same_v<DTypeKV, half_t> ? DType::kFloat16 : DType::kFloat8E4M3));
static_assert(std::is_same_v<DTypeKV, half_t> || std::is_same_v<DTypeKV, fp8_e4m3_t>);
static_assert(std::is_same_v<DTypeO, DTypeQ>);
static_assert(std::get<3>(kPart) == HEAD_DIM_QK && std::get<4>(kPart) == HEAD_DIM_VO);
static_assert(HEAD_DIM_QK == 64 ? HEAD_DIM_VO == 64 : HEAD_DIM_QK == 192 && HEAD_DIM_VO == 128);
static_assert(std::get<5>(kPart) == VARIANT && (VARIANT == kDefault || VARIANT == (kRope | kSoftCap)));
static_assert(Variant::transforms_logits == (VARIANT != kDefault));
static_assert((POS_ENCODING == PosEncodingMode::kRopeLlama) == (VARIANT != kDefault));
inline int body() DISPATCH_head_dims(no such value, HEAD_DIM_QK, HEAD_DIM_VO, return HEAD_DIM_QK)  // the body alone
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_nvcc)])
def test_each_part_has_its_constants(device, tmp_path):
    """A part's constants are those of its row in the list that the binding searches."""
    coverage = COVERAGE | {"head_dims": ["64", "192:128"], "variants": ["default", "rope+soft_cap"]}
    spec = dispatching_spec("prefill", device, coverage)
    assert list(spec.units())[1:] == [
        f"csrc/prefill_{device}.{part}.c{'u' if device == 'cuda' else 'c'}" for part in range(8)
    ]
    header = "cuda/tile/convert.cuh" if device == "cuda" else "cpu/simd/vec.h"
    text = PARTS.replace("{header}", header)
    if device == "cuda":
        assert not compiled(spec, text, tmp_path, "-DFLASHINFER_PART=5")
        return
    for part in range(8):
        assert not compiled(spec, text, tmp_path, f"-DFLASHINFER_PART={part}"), part
    wrong = text.replace("== HEAD_DIM_QK &&", "!= HEAD_DIM_QK &&")
    assert "static assertion failed" in compiled(spec, wrong, tmp_path, "-DFLASHINFER_PART=0")


DISPATCH = """
#include "axes_config.h"
#include <cstring>
namespace flashinfer {
static int number_of(int dtype, int block, int mode) {
  DISPATCH_dtype(static_cast<DType>(dtype), T, {
    DISPATCH_block(block, BLOCK, DISPATCH_mode(mode, MODE, return sizeof(T) + BLOCK + MODE))
  })
}
extern "C" int number(int dtype, int block, int mode, char* text) {
  try {
    return number_of(dtype, block, mode);
  } catch (const std::exception& err) {
    return std::strlen(std::strcpy(text, err.what())), -1;
  }
}
}
"""


# Included before the configuration.
WORDS = "namespace flashinfer { constexpr int kFast = 7, kSmall = 32; }\n"


@pytest.mark.parametrize("several", [False, True], ids=["specialised", "dispatching"])
def test_dispatch_of_any_familys_axes(several, tmp_path):
    """Axes of element types, numbers and words dispatch correctly, with one value or several."""
    coverage = {"dtype": ["float32"], "block": [64], "mode": ["fast+small"]}
    if several:
        coverage = {"dtype": ["float32", "float16"], "block": [64, 256], "mode": ["fast+small", "fast"]}
    spec = jit.gen_jit_spec(
        "axes", [tmp_path / "axes.cc"], coverage=coverage, template="csrc/config.h.jinja", config_header="axes_config.h"
    )

    text = WORDS + DISPATCH
    library = tmp_path / "axes.so"
    assert not compiled(spec, text, tmp_path, "-shared", "-fPIC", "-o", str(library), syntax_only=False)
    number = ctypes.CDLL(str(library)).number
    message = ctypes.create_string_buffer(1000)

    def ask(*values: int) -> int | str:
        got = number(*values, message)
        return message.value.decode() if got == -1 else got

    assert ask(1, 64, 39) == 4 + 64 + 39
    if several:
        assert ask(2, 256, 7) == 2 + 256 + 7
    built_for = {axis: ", ".join(map(str, values)) for axis, values in spec.coverage}
    assert ask(3, 64, 39) == f"ValueError: dtype: got bfloat16, this module was built for {built_for['dtype']}"
    assert ask(1, 65, 39) == f"ValueError: block: got 65, this module was built for {built_for['block']}"
    assert ask(1, 64, 1) == f"ValueError: mode: got 1, this module was built for {built_for['mode']}"


LOAD = """
import sys, torch
from flashinfer.jit import subscribe
from flashinfer._ops.configured import load_configured
from flashinfer.jit.modules._attention import attention_spec
from tests.support.attention_modules import NONE, single, tensors
subscribe(lambda event: print(event, file=sys.stderr))
for family, dtype, head_dims in (one.split(",") for one in sys.argv[1:]):
    module = load_configured(attention_spec(family, "cpu", f"{dtype}:{dtype}:{dtype}", head_dims, "default"))
    out, lse = single(module, *tensors(getattr(torch, dtype), head_dims, kv_len=9), *NONE, 0.1, 0.0)
    assert not out.isnan().any()
    print(module.__name__.removeprefix("torch.ops."))
"""


def several(*head_dims: str) -> jit.JitSpec:
    coverage = {"dtypes": ["float32:float32:float32"], "head_dims": list(head_dims), "variants": ["default"]}
    return dispatching_spec("decode", "cpu", coverage)


@pytest.fixture(autouse=True)
def unoptimised(monkeypatch):
    """Build fast: these tests only look up and load modules, and do not measure them."""
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[..., Path]:
    """Return the directory of a dispatching module for some head sizes, built once for all workers."""
    base = tmp_path_factory.getbasetemp()
    workspace = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dispatching"

    @cache
    def build(*head_dims: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLASHINFER_WORKSPACE_DIR", str(workspace))
            patch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")
            return several(*head_dims).build().directory

    return build


def publish(directory: Path, folder: Path) -> None:
    """Copy an artifact into an AOT directory."""
    shutil.copytree(directory, folder / "decode_cpu")


@pytest.mark.slow
def test_the_module_of_a_call(python, tmp_path, built, compilers_started):
    """A call gets an exact artifact, else a dispatching one that covers it, else a new build."""
    publish(built("40", "72"), tmp_path / "aot")
    before = compilers_started()
    aot = {"FLASHINFER_AOT_DIR": str(tmp_path / "aot")}
    asked = ("decode,float32,40", "decode,float32,72")
    assert python(LOAD, *asked, **aot, FLASHINFER_DISABLE_JIT="1").stdout.split() == ["decode_cpu", "decode_cpu"]
    assert compilers_started() == before
    # Another size is built. It is exact, so from the workspace it precedes the dispatching module.
    assert python(LOAD, "decode,float32,80", "decode,float32,40", **aot).stdout.split() == [
        "decode_f32_d80_cpu",
        "decode_cpu",
    ]
    attention_spec("decode", "cpu", "float32:float32:float32", "40", "default").build()
    assert compilers_started() == before + 4
    done = python(LOAD, *asked, "decode,float32,88", **aot, check=False, FLASHINFER_DISABLE_JIT="1")
    assert done.stdout.split() == ["decode_f32_d40_cpu", "decode_cpu"]
    assert "module 'decode_f32_d88_cpu' is not built" in done.stderr
    assert re.search(f"'miss'.*'decode_cpu'.*{tmp_path}/aot/decode_cpu: built without .*head_dims 88", done.stderr)
    assert compilers_started() == before + 4


@pytest.mark.slow
def test_one_dispatching_module_of_two_in_a_process(python, tmp_path, built):
    """Operators are registered once: the second directory's module is skipped, and an exact one is needed."""
    for folder, head_dims in (("a", ("40", "72")), ("b", ("80",))):
        publish(built(*head_dims), tmp_path / folder)
    directories = {"FLASHINFER_AOT_DIR": f"{tmp_path / 'a'}:{tmp_path / 'b'}", "FLASHINFER_DISABLE_JIT": "1"}
    done = python(LOAD, "decode,float32,40", "decode,float32,80", **directories, check=False)
    assert done.stdout.split() == ["decode_cpu"] and "module 'decode_f32_d80_cpu' is not built" in done.stderr
    assert python(LOAD, "decode,float32,80", **directories).stdout.split() == ["decode_cpu"]


def test_a_dispatching_module_of_other_sources_is_none(tmp_path, built, monkeypatch):
    publish(built("40", "72"), tmp_path / "aot")
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    spec = attention_spec("decode", "cpu", "float32:float32:float32", "40", "default")
    assert has_dispatching_module(spec)
    manifest = tmp_path / "aot" / "decode_cpu" / "manifest.json"
    manifest.write_text(re.sub(r'"key": "\w{4}', '"key": "0000', manifest.read_text()))
    assert not has_dispatching_module(spec)
