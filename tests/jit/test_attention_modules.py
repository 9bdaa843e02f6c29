"""Modules of attention: two forms of one source, which of them a call gets, and users' variants."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer import jit
from flashinfer.jit.modules import _attention, decode, prefill
from flashinfer.jit.modules._attention import attention_spec, dispatching_spec
from flashinfer.jit.template import render_config

from ..support.attention_modules import FLASH_SIGMOID, sigmoid

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("decode", "prefill")
VARIANTS = {"default": "None, None, 0.125, 0.0", "rope+soft_cap": "None, None, 0.125, 5.0"}
COVERAGE = {
    "cpu": {
        "dtypes": ["float32:float32:float32", "bfloat16:float8_e4m3fn:bfloat16"],
        "head_dims": ["64", "192:128"],
        "variants": list(VARIANTS),
    },
    "cuda": {
        "dtypes": ["float16:float16:float16", "bfloat16:float8_e4m3fn:bfloat16"],
        "head_dims": ["64"],
        "variants": list(VARIANTS),
    },
}
# One after the other by which each value of each axis is met, for specialised modules take their time to compile.
CHOSEN = {"cpu": ((0, 0, 0), (1, 1, 1), (0, 1, 0)), "cuda": ((0, 0, 0), (1, 0, 1))}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
BACKENDS = ["cpu", pytest.param("cuda", marks=needs_nvcc)]

COMPARE = """
import sys, torch
from flashinfer.jit.load import load
from flashinfer.jit.modules._attention import attention_spec, dispatching_spec, variant_bits
from tests.support.attention_modules import single, tensors
from tests.jit.test_attention_modules import CHOSEN, COVERAGE, VARIANTS, axes
family, backend = sys.argv[1:]
several = load(dispatching_spec(family, backend, COVERAGE[backend]))
for dtypes, head_dims, variant in axes(backend):
    one = load(attention_spec(family, backend, dtypes, head_dims, variant))
    q_type, kv_type, _ = (getattr(torch, name) for name in dtypes.split(":"))
    q, k, v = tensors(torch.float32, head_dims, 1 if family == "decode" else 37, device=backend)
    q, k, v = q.to(q_type), k.to(kv_type), v.to(kv_type)
    own = eval(VARIANTS[variant])
    first = single(one, q, k, v, *own, variant=variant_bits(variant))
    second = single(several, q, k, v, *own, variant=variant_bits(variant))
    assert one is not several and not first[0].isnan().any() and first[0].any()
    assert all(torch.equal(a, b) for a, b in zip(first, second)), (dtypes, head_dims, variant)
q, k, v = tensors(torch.float32, "128")
for module, got in ((several, "dtypes"), (one, "dtypes")):
    try:
        single(module, q.half(), k.half(), v.half(), None, None, 1.0, 0.0)
    except RuntimeError as err:
        print(str(err).splitlines()[0])
try:
    single(several, q, k, v, None, None, 1.0, 0.0)
except RuntimeError as err:
    print(str(err).splitlines()[0])
q, k, v = tensors(torch.float32, "64")
try:
    single(several, q, k, v, None, None, 1.0, 0.0, variant=2)
except RuntimeError as err:
    print(str(err).splitlines()[0])
"""


def axes(backend: str) -> list[tuple[str, str, str]]:
    """The configurations that are built in both forms."""
    values = list(COVERAGE[backend].values())
    return [tuple(values[axis][number] for axis, number in enumerate(one)) for one in CHOSEN[backend]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_give_the_same_bits(family, backend, python, monkeypatch):
    if backend == "cuda" and not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
        specs = [attention_spec(family, backend, *one) for one in axes(backend)]
        artifacts = jit.build_jit_specs([dispatching_spec(family, backend, COVERAGE[backend]), *specs])
        assert all(artifact.path.stat().st_size > 0 for artifact in artifacts)
        return
    wanted = [
        "ValueError: dtypes: got float16:float16:float16, this module was built for bfloat16:float8_e4m3fn:bfloat16,"
        " float32:float32:float32",
        "ValueError: dtypes: got float16:float16:float16, this module was built for float32:float32:float32",
        "ValueError: head_dims: got 128, this module was built for 192:128, 64",
        "ValueError: variants: got alibi, this module was built for default, rope+soft_cap",
    ]
    printed = python(COMPARE, family, backend).stdout.splitlines()
    assert printed == wanted if backend == "cpu" else len(printed) == 4


def test_the_chosen_configurations_meet_every_value():
    for backend, coverage in COVERAGE.items():
        for axis, values in enumerate(coverage.values()):
            assert {one[axis] for one in axes(backend)} == set(values)


LOAD = """
import sys, torch
from flashinfer.jit import subscribe
from flashinfer._ops.configured import load_configured
from flashinfer.jit.modules._attention import attention_spec
from tests.support.attention_modules import single, tensors
subscribe(lambda event: print(event, file=sys.stderr))
for family, dtype, head_dims in (one.split(",") for one in sys.argv[1:]):
    module = load_configured(attention_spec(family, "cpu", f"{dtype}:{dtype}:{dtype}", head_dims, "default"))
    out, lse = single(module, *tensors(getattr(torch, dtype), head_dims, kv_len=9), None, None, 0.1, 0.0)
    assert not out.isnan().any()
    print(module.__name__.removeprefix("torch.ops."))
"""


def several(*head_dims: str) -> jit.JitSpec:
    coverage = {"dtypes": ["float32:float32:float32"], "head_dims": list(head_dims), "variants": ["default"]}
    return dispatching_spec("decode", "cpu", coverage)


def publish(spec: jit.JitSpec, folder: Path) -> None:
    """Build a module into the workspace, and move it from there into an AOT directory."""
    shutil.move(spec.build().directory, folder / spec.name)


def test_what_a_call_gets(python, tmp_path, compilers_started):
    """An exact artifact wherever it is; else a dispatching one that was built for the configuration; else a new one."""
    (tmp_path / "aot").mkdir()
    publish(several("40", "72"), tmp_path / "aot")
    aot = {"FLASHINFER_AOT_DIR": str(tmp_path / "aot")}
    assert compilers_started() == 3
    asked = ("decode,float32,40", "decode,float32,72")
    assert python(LOAD, *asked, **aot).stdout.split() == ["decode_cpu", "decode_cpu"]
    assert python(LOAD, *asked, **aot, FLASHINFER_DISABLE_JIT="1").stdout.split() == ["decode_cpu", "decode_cpu"]
    assert compilers_started() == 3
    # Another size is built; in the workspace it is exact, and so comes before the dispatching one.
    assert python(LOAD, "decode,float32,80", "decode,float32,40", **aot).stdout.split() == [
        "decode_f32_d80_cpu",
        "decode_cpu",
    ]
    attention_spec("decode", "cpu", "float32:float32:float32", "40", "default").build()
    assert compilers_started() == 7
    assert python(LOAD, *asked, **aot).stdout.split() == ["decode_f32_d40_cpu", "decode_cpu"]
    refused = python(LOAD, "decode,float32,88", **aot, check=False, FLASHINFER_DISABLE_JIT="1").stderr
    assert "module 'decode_f32_d88_cpu' is not built" in refused
    assert re.search(f"'miss'.*'decode_cpu'.*{tmp_path}/aot/decode_cpu: built without .*head_dims 88", refused)
    assert compilers_started() == 7


def test_one_dispatching_module_of_two_in_a_process(python, tmp_path):
    """Operators are registered once: the second directory's module is passed over, and the exact one built."""
    for folder, head_dims in (("a", "40"), ("b", "72")):
        (tmp_path / folder).mkdir()
        publish(several(head_dims), tmp_path / folder)
    directories = f"{tmp_path / 'a'}:{tmp_path / 'b'}"
    loaded = python(LOAD, "decode,float32,40", "decode,float32,72", FLASHINFER_AOT_DIR=directories).stdout.split()
    assert loaded == ["decode_cpu", "decode_f32_d72_cpu"]


def test_a_dispatching_module_of_other_sources_is_none(python, tmp_path):
    (tmp_path / "aot").mkdir()
    publish(several("40", "72"), tmp_path / "aot")
    manifest = tmp_path / "aot" / "decode_cpu" / "manifest.json"
    manifest.write_text(re.sub(r'"key": "\w{4}', '"key": "0000', manifest.read_text()))
    assert python(LOAD, "decode,float32,40", FLASHINFER_AOT_DIR=str(tmp_path / "aot")).stdout.split() == [
        "decode_f32_d40_cpu"
    ]


# --- specs ---


def test_names_say_the_configuration():
    name = {
        ("float32:float32:float32", "64", "default"): "decode_f32_d64_cpu",
        ("float16:float8_e5m2:float16", "192:128", "rope+soft_cap"): "decode_f16_kv_e5m2_d192_128_rope_soft_cap_cpu",
        ("float16:bfloat16:float32", "64", "alibi"): "decode_f16_kv_bf16_o_f32_d64_alibi_cpu",
    }
    for axes_, wanted in name.items():
        spec = attention_spec("decode", "cpu", *axes_)
        assert spec.name == spec.namespace == wanted
    names = [
        attention_spec("prefill", "cpu", f"{q}:{kv}:{q}", dims, variant).name
        for q, kv, dims, variant in product(
            ("float32", "float16"), ("float16", "float8_e4m3fn"), ("64", "128"), ("default", "rope", "alibi+soft_cap")
        )
    ]
    assert len(set(names)) == len(names)


def test_flashinfers_addresses():
    half = ("float16", "float16", "float16")
    import flashinfer.jit.attention as addresses

    for name in addresses.__all__:
        assert callable(getattr(addresses, name))
    assert addresses.gen_single_decode_module is jit.gen_single_decode_module is flashinfer.gen_single_decode_module
    assert addresses.get_single_decode_uri(*half, 64, 64) == "decode_f16_d64_cuda"
    assert addresses.get_batch_prefill_uri("fa2", *half, "int32", 192, 128, 0, False, True, device="cpu") == (
        "prefill_f16_d192_128_soft_cap_cpu"
    )
    with pytest.raises(AttributeError, match="gen_nothing_module"):
        addresses.gen_nothing_module  # noqa: B018


@pytest.mark.parametrize(
    "generate, message",
    [
        (lambda: decode.gen_single_decode_module("int8", "int8", "int8", 64, 64), "dtype_q: got int8, wanted one of"),
        (
            lambda: decode.gen_single_decode_module("float32", "float32", "float32", 64, 64),
            "dtype_q: got float32, wanted one of float16, bfloat16 on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "bfloat16", "float16", 64, 64),
            "dtype_kv: got bfloat16, wanted one of float16, float8_e4m3fn, float8_e5m2 beside float16 queries on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 96, 96),
            r"head_dim: got 96, wanted one of 64, 128, 256, 192:128 \(queries:values\) on cuda",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 520, 520, backend="cpu"),
            "head_dim: got 520, wanted a multiple of 8 up to 512 on cpu",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 64, 64, 3),
            "pos_encoding_mode: got 3, wanted 0",
        ),
        (
            lambda: decode.gen_single_decode_module("float16", "float16", "float16", 64, 64, backend="tpu"),
            "backend: got 'tpu', wanted one of cpu, cuda",
        ),
        (
            lambda: decode.gen_batch_decode_module("float16", "float16", "float16", "int64", 64, 64),
            "dtype_idx: got int64, wanted int32",
        ),
        (
            lambda: prefill.gen_single_prefill_module("fa3", "float16", "float16", "float16", 64, 64),
            "backend: got 'fa3'.*wanted 'auto' or 'fa2'",
        ),
        (
            lambda: prefill.gen_single_prefill_module("fa4", "float16", "float16", "float16", 64, 64),
            "backend: got 'fa4', wanted one of auto, fa2, fa3",
        ),
        (lambda: sigmoid("no-name"), "uri: got 'no-name', wanted a C\\+\\+ identifier"),
        (lambda: sigmoid(name=""), "variant_name: got '', wanted"),
        (lambda: sigmoid(decl="/nowhere/variant.h"), "variant_decl: got the path '/nowhere/variant.h', wanted a file"),
    ],
)
def test_bad_arguments(generate, message):
    with pytest.raises(ValueError, match=message):
        generate()


@pytest.mark.parametrize(
    "parameters, message",
    [
        ((["a"], [], [], []), "additional tensors: got 1 names and 0 dtypes"),
        ((["a b"], ["float"], [], []), "additional tensor names: got 'a b', wanted a C\\+\\+ identifier"),
        ((["kv_lens"], ["float"], [], []), "additional tensor names: got 'kv_lens', wanted .* that is not taken"),
        (([], [], ["out"], ["double"]), "additional scalar names: got 'out', wanted .* that is not taken"),
        ((["a"], ["int7"], [], []), "dtype of a: got 'int7', wanted one of float"),
        (([], [], ["a"], ["half"]), "dtype of a: got 'half', wanted one of double, float, int64_t"),
        ((["a", "a"], ["float", "float"], [], []), "additional tensor names: got a, a, wanted distinct"),
        ((["a"], ["float"], ["a"], ["double"]), "got one name for a tensor and a scalar"),
    ],
)
def test_bad_parameters_of_variants(parameters, message):
    half = ("float16",) * 3
    with pytest.raises(ValueError, match=message):
        jit.gen_customize_batch_decode_module("one", *half, "int32", 64, 64, *parameters, "V", "struct V;")
    with pytest.raises(ValueError, match=message):
        jit.gen_customize_batch_prefill_module("fa2", "one", *half, "int32", 64, 64, *parameters, "V", "struct V;")


def test_what_a_variant_cannot_be():
    half = ("float16",) * 3
    with pytest.raises(ValueError, match="pos_encoding_mode: got 2, wanted 0 or 1"):
        jit.gen_customize_single_decode_module("one", *half, 64, 64, [], [], [], [], "V", "struct V;", 2)
    with pytest.raises(ValueError, match="fp8_enabled: got True, wanted False"):
        jit.gen_customize_single_prefill_module(
            "fa2", "one", *half, 64, 64, [], [], [], [], "V", "struct V;", fp8_enabled=True
        )
    with pytest.raises(ValueError, match="idtype: got int64, wanted int32"):
        jit.gen_customize_batch_decode_module("one", *half, "int64", 64, 64, [], [], [], [], "V", "struct V;")


def test_names_that_are_taken_are_known():
    """Every member of the parameters and every argument of the operators, but for the two that may be hidden."""
    struct = (ROOT / "include/flashinfer/attention/params.h").read_text().split("struct AttentionParams {")[1]
    # Members stand two spaces in: a function's name before its parenthesis, and fields before a comma or semicolon.
    members = re.findall(r"^  (?:FLASHINFER_HD )?(\w[^;({]*[;(])", struct[: struct.index("\n};")], re.MULTILINE)
    names = {name for member in members for name in re.findall(r"(\w+)(?=[,;(])", member)}
    for file, begin, end in (
        ("binding", '"run(', "FLASHINFER_ATTENTION_SETTING("),
        ("arguments", "SETTING(written)", "ADDITIONAL_SCHEMA"),
    ):
        binding = (ROOT / f"csrc/attention_{file}.h").read_text()
        binding = binding[binding.index(begin) :]
        schema = "".join(re.findall(r'"([^"]*)"', binding[: binding.index(end)]))
        names |= set(re.findall(r"(\w+)(?=[,)]|$)", schema))
    assert {"q", "kv", "lse", "get_qo_len", "num_items", "float_workspace", "variant"} < names
    assert names - _attention.RESERVED_NAMES == {"custom_mask", "mask_indptr"}


def test_configuration_headers():
    """One value: the body alone. Several: a case for each, and constants for each part. A variant: its text at its lines."""
    coverage = {"dtypes": ["float32:float32:float32"], "head_dims": ["64", "192:128"], "variants": ["default"]}
    text = render_config(dispatching_spec("prefill", "cpu", coverage))
    assert "#define DISPATCH_dtypes(config, INDEX, ...) \\\n  { constexpr int INDEX = 0; __VA_ARGS__ }" in text
    assert "if ((config).is_head_dims(64, 64)) { constexpr int INDEX = 1;" in text
    parts = text[text.index("#if FLASHINFER_PART == 0") :].split("#elif FLASHINFER_PART == 1")
    assert ["constexpr int HEAD_DIM_QK = 192;" in part for part in parts] == [True, False]
    assert ["constexpr int HEAD_DIM_QK = 64;" in part for part in parts] == [False, True]
    assert "FLASHINFER_PART ==" not in render_config(
        attention_spec("prefill", "cpu", "float32:float32:float32", "64", "rope")
    )
    text = render_config(sigmoid())
    assert '#line 1 "sigmoid: variant_decl"\n' + FLASH_SIGMOID in text
    assert "float logits_scale;" in text and '", float sigmoid_bias"' in text
    own = jit.gen_customize_single_decode_module(
        "own", *("float16",) * 3, 64, 64, ["maybe_a", "custom_mask"], ["half", "uint8_t"], ["n"], ["int64_t"], "V",
        "struct V;",
    )  # fmt: skip
    text = render_config(own)
    assert "half_t* maybe_a;" in text and '", Tensor? maybe_a"' in text and '", Tensor own_custom_mask"' in text
    assert "int64_t n;" in text and '", int n"' in text
